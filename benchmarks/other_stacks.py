"""Scores the predictions of other tools' memory against published runs, and writes the table of docs/stacks.md.

    python benchmarks/other_stacks.py ROWS.csv [--rows] [--check | --write]

ROWS.csv has one row a measured run with the columns that `fitune.memory.stacks.rows.settings_of` reads. Rows count
by group of source and model. `--rows` prints every row, `--write` renews the table, `--check` fails when it is old.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fitune.errors import UserError  # noqa: E402
from fitune.memory.stacks import predict  # noqa: E402
from fitune.memory.stacks.rows import settings_of, stack_of  # noqa: E402
from fitune.units import GIB  # noqa: E402

PAGE = ROOT / "docs" / "stacks.md"
BEGIN, END = "<!-- table: benchmarks/other_stacks.py --write -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Scored:
    """One row: ``error`` is predicted / measured - 1; ``section`` is how it is counted."""

    identity: str
    stack: str
    group: tuple[str, str]
    section: str
    measured_gib: float
    predicted_gib: float
    metric: str
    phase: str

    @property
    def error(self) -> float:
        return self.predicted_gib / self.measured_gib - 1


def section_of(row: dict[str, str]) -> str:
    """``one GPU`` is gated; the others are reported."""
    if row["completeness"] != "A":
        return "incomplete"
    if row["n_gpus"] != "1":
        return "several GPUs"
    return "gptq" if "gptq" in row["base_dtype"] else "one GPU"


def score(path: Path) -> list[Scored]:
    """Every row that can be described; those with blanks or models without shape are left out."""
    scored = []
    with path.open(encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            stack = stack_of(row)
            if stack is None:
                continue
            try:
                prediction = predict(settings_of(row), stack)
            except (UserError, ValueError):
                continue
            group = (row["source"], row["model"])
            scored.append(
                Scored(row["id"], stack, group, section_of(row), float(row["peak_gib"]), prediction.peak_bytes / GIB,
                       row["metric"], prediction.phase)
            )  # fmt: skip
    return scored


def by_group(rows: list[Scored]) -> dict[tuple[str, str], tuple[float, float]]:
    """Mean absolute error and mean error of each group."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row.error)
    return {group: (mean(map(abs, errors)), mean(errors)) for group, errors in groups.items()}


def line(name: str, rows: list[Scored]) -> str:
    """A line of the table: each group counts once."""
    groups = by_group(rows)
    worst = min(bias for _, bias in groups.values())
    return (
        f"| {name} | {len(rows)} | {len(groups)} | {100 * mean(mae for mae, _ in groups.values()):.1f} % "
        f"| {100 * mean(bias for _, bias in groups.values()):+.1f} % | {100 * worst:+.1f} % "
        f"| {100 * min(row.error for row in rows):+.1f} % | {100 * max(row.error for row in rows):+.1f} % |"
    )


def table(rows: list[Scored]) -> str:
    """The whole table, per section and stack."""
    out = [
        "| stack, section | rows | groups | mean size of error | mean error | worst group | lowest row | highest row |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for section in ("one GPU", "gptq", "several GPUs", "incomplete"):
        there = [row for row in rows if row.section == section]
        for stack in sorted({row.stack for row in there}):
            out.append(line(f"{stack}, {section}", [row for row in there if row.stack == stack]))
        if there:
            out.append(line(f"**all, {section}**", there))
    gated = [row for row in rows if row.section == "one GPU"]
    for metric in ("allocated", "reserved", "nvidia-smi"):
        some = [row for row in gated if row.metric == metric]
        if some:
            out.append(line(f"one GPU, {metric} only", some))
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--rows", dest="each", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    rows = score(given.rows)
    text = table(rows)
    if given.each:
        for row in sorted(rows, key=lambda r: (r.section, r.stack, r.group, r.identity)):
            print(
                f"{row.section:13} {row.stack:12} {row.identity:9} {row.group[1][-28:]:28} {row.metric:10} "
                f"{row.measured_gib:7.2f} {row.predicted_gib:7.2f} {100 * row.error:+6.1f} % {row.phase}"
            )
    print(text)
    if not (given.write or given.check):
        return 0
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    renewed = f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"
    if given.write:
        PAGE.write_text(renewed, encoding="utf-8")
    return int(given.check and renewed != page)


if __name__ == "__main__":
    raise SystemExit(main())
