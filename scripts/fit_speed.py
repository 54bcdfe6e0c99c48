"""Fit the step-time model to measured records, and show predicted against measured.

    python scripts/fit_speed.py benchmarks/results/*.json            # errors of the constants that ship
    python scripts/fit_speed.py benchmarks/results/*.json --fit      # fit to every other record, errors on the rest
    python scripts/fit_speed.py benchmarks/results/*.json --write    # the same, then fit to all and store

`--page` writes the tables of docs/speed.md from the constants that ship: run it after `--write`.

The host's factor of a record's file (or of the host it names) is fitted too; the table shows errors without it (as a
user on an unknown host sees them) and with it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fitune.catalog import gpus, models
from fitune.plan import Adapter, Plan
from fitune.speed import constants, predict
from fitune.speed.fit import Fit, Point, block, fit, points_of, predicted, quantile

CONSTANTS = Path(constants.__file__)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "speed.md"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="record files")
    parser.add_argument("--fit", action="store_true", help="fit to half of the records, show the other half's errors")
    parser.add_argument("--write", action="store_true", help="then fit to all of them and write constants.py")
    parser.add_argument("--page", action="store_true", help="write the tables of docs/speed.md")
    args = parser.parse_args(argv)
    if args.page:
        write_page()
        return
    if not args.files:
        parser.error("name the record files, such as benchmarks/results/*.json")
    read = [(file.name, json.loads(file.read_text(encoding="utf-8"))) for file in args.files]
    pairs = [(name, record) for name, found in read if isinstance(found, list) for record in found]
    points, skipped = points_of(pairs)
    for reason in skipped:
        print(f"left out: {reason}")
    points.sort(key=lambda p: (p.host, p.name))
    if not (args.fit or args.write):
        hosts = {p.host: constants.HOST_FACTORS.get(p.host, 1.0) for p in points}
        table("constants that ship", points, Fit(constants.FITTED, hosts, 0.0))
        return
    half = fit(points[::2])
    held_out = points[1::2]
    hosts = {p.host: half.hosts.get(p.host, 1.0) for p in held_out}
    table("fitted half", points[::2], half)
    summary = table("held-out half", held_out, Fit(half.fitted, hosts, half.loss))
    if args.write:
        whole = fit(points)
        table("fitted to all", points, whole)
        names = ", ".join(sorted({file for file, record in pairs if record["name"] in {p.name for p in points}}))
        store(block(whole, f"{len(points)} records of {names}; held-out half: {summary}"))
        print(f"written: {CONSTANTS}; now run: python scripts/fit_speed.py --page")


def table(title: str, points: list[Point], found: Fit) -> str:
    """Prints the rows and returns a line on the errors."""
    print(f"\n== {title}")
    print(f"{'record':42} {'tokens':>7} {'measured':>9} {'predicted':>9} {'error':>7} {'on host':>8}  interval, bound")
    plain, on_host, large, inside = [], [], [], 0
    for point in points:
        blind = predicted(point, found.fitted)
        informed = predicted(point, found.fitted, found.hosts[point.host])
        error, with_host = blind.step_s / point.measured_s - 1, informed.step_s / point.measured_s - 1
        plain.append(abs(error))
        on_host.append(abs(with_host))
        if point.work.tokens >= 4096:
            large.append(abs(with_host))
        inside += blind.low_s <= point.measured_s <= blind.high_s
        print(
            f"{point.name:42} {point.work.tokens:7.0f} {point.measured_s:9.4f} {blind.step_s:9.4f} {error:+7.1%} "
            f"{with_host:+8.1%}  {blind.low_s:.3f} to {blind.high_s:.3f}, {blind.bound}"
        )
    if not points:
        return "no record"
    text = f"median {statistics.median(on_host):.1%}, 95 % {quantile(on_host, 0.95):.1%} on their hosts"
    if large:
        text += f" (4k tokens and more: {statistics.median(large):.1%}, {quantile(large, 0.95):.1%})"
    text += f"; {statistics.median(plain):.1%}, {quantile(plain, 0.95):.1%} without knowing the host"
    print(f"{text}; {inside} of {len(points)} inside the interval")
    return text


CARDS = (
    "NVIDIA H200", "H100 SXM", "A100 80GB", "RTX 3060", "RTX 3080", "RTX 3090", "RTX 4060 laptop", "RTX 4090",
    "RTX 5090", "T4", "RX 7900 XTX",
)  # fmt: skip
JOBS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("8B NF4, 2x2048", dict(batch=2)),
    ("8B NF4, 8x512", dict(batch=8, seq_len=512)),
    ("8B NF4 streamed, 4x2048", dict(stream_from="pinned", resident_layers=0)),
    ("8B bf16 streamed, 4x2048", dict(stream_from="pinned", resident_layers=0, wide=True)),
)


def page_tables() -> str:
    """Predicted tokens/s of some jobs on some cards, with their intervals."""
    lines = ["| card | basis | " + " | ".join(name for name, _ in JOBS) + " |", "| --- | --- |" + " ---: |" * len(JOBS)]
    for name in CARDS:
        gpu = gpus.find(name)[0]
        times = [predict(job(gpu, **changes), models.find("meta-llama/Llama-3.1-8B")) for _, changes in JOBS]
        cells = [f"{two(t.tokens_per_s)} ({two(t.tokens / t.high_s)} to {two(t.tokens / t.low_s)})" for t in times]
        lines.append(f"| {gpu.name} | {times[0].basis} | " + " | ".join(cells) + " |")
    return "\n".join(["", f"Constants fitted on: {constants.FITTED_ON}.", "", *lines, ""])


def two(value: float) -> str:
    """Two significant digits: more would claim too much."""
    digits = 10 ** max(0, len(str(int(value))) - 2)
    return f"{round(value / digits) * digits:,.0f}"


def job(gpu: gpus.Gpu, *, batch: int = 4, seq_len: int = 2048, wide: bool = False, **changes: Any) -> Plan:
    """LoRA r16 on all linears of Llama-3.1-8B, every layer recomputed, one micro-batch."""
    precision = "bf16" if gpu.bf16 else "fp16"
    values: dict[str, Any] = dict(
        model="meta-llama/Llama-3.1-8B", num_layers=32, method="lora", base_format=precision if wide else "nf4",
        double_quant=True, adapter=Adapter(16, 32, 0.0, "none", ("all-linear",)), device="cuda", device_name=gpu.name,
        precision=precision, loss_scaling=not gpu.bf16, embedding_place="host",
        attention="flash" if gpu.flash_attention else "efficient", seq_len=seq_len, batch=batch, micro_batch=batch,
        accumulation_order="micro-batch-major", packing=False, recompute_layers=32, loss_chunk=256, optimizer="adamw",
        lr=1e-4, schedule="constant", warmup=0.0, weight_decay=0.0, clip=1.0, seed=0, budget_bytes=None,
    )  # fmt: skip
    return Plan(**(values | changes))


def write_page() -> None:
    """Replace the tables between the markers of docs/speed.md."""
    source = PAGE.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- tables: begin -->\n).*?(<!-- tables: end -->)", re.DOTALL)
    assert marked.search(source), f"{PAGE} has lost its markers"
    PAGE.write_text(marked.sub(lambda m: m[1] + page_tables() + m[2], source), encoding="utf-8")
    print(f"written: {PAGE}")


def store(text: str) -> None:
    """Replace the block between the markers of constants.py."""
    source = CONSTANTS.read_text(encoding="utf-8")
    marked = re.compile(r"(# fitted: begin\n).*?(\n# fitted: end)", re.DOTALL)
    assert marked.search(source), f"{CONSTANTS} has lost its markers"
    CONSTANTS.write_text(marked.sub(lambda m: m[1] + text + m[2], source), encoding="utf-8")


if __name__ == "__main__":
    main()
