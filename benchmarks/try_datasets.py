"""Train two steps on every file of a folder, or note how it was refused; writes a table.

python benchmarks/try_datasets.py FOLDER --table docs/datasets-tried.md
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import fitune
from fitune.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    rows = []
    for file in sorted(args.folder.iterdir()):
        if file.suffix.lower() in (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt") and file.stem != "LICENSES":
            rows.append(try_file(file, args.model, args.steps))
            print(" | ".join(rows[-1]), flush=True)
    if args.table:
        args.table.write_text(table(rows, args.model, args.steps), encoding="utf-8")


def try_file(file: Path, model: str, steps: int) -> tuple[str, str, str, str]:
    """(file, what was recognised, records, outcome)."""
    seen: dict[str, Any] = {}
    losses: list[float] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "data":
            seen.update(event)
        if event["event"] == "step":
            losses.append(event["loss"])

    out = Path(tempfile.mkdtemp()) / "run"
    started = time.perf_counter()
    try:
        fitune.train(model, data=str(file), steps=steps, batch=2, seq_len=256, eval_share=0, out=str(out),
                     devices="cpu", on_event=on_event)  # fmt: skip
    except UserError as error:
        text = f"refused: {error.what}: {error.why}; {error.fix}".replace(f"{file.parent}/", "").replace("|", "\\|")
        return file.name, "", "", text
    finally:
        shutil.rmtree(out.parent, ignore_errors=True)
    left_out = "; ".join(f"{count} left out: {reason}" for reason, count in (seen.get("dropped") or {}).items())
    lengths = seen["lengths"]
    records = f"{lengths['records']:,}" + (f" ({left_out})" if left_out else "")
    shown = ", ".join(f"{loss:.3f}" for loss in losses)
    return file.name, seen["layout"], records, f"trained, loss {shown} ({time.perf_counter() - started:.0f} s)"


def table(rows: list[tuple[str, str, str, str]], model: str, steps: int) -> str:
    import torch
    import transformers

    versions = f"fitune {fitune.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    date = datetime.date.today().isoformat()
    head = (
        "# Files tried\n\n"
        f"Written by `benchmarks/try_datasets.py` on {date}: {steps} steps of {model} on the CPU (batch "
        f"2, 256 tokens), {versions}.\n\n| file | recognised as | records | outcome |\n| --- | --- | ---: | --- |\n"
    )
    return head + "".join("| " + " | ".join(row) + " |\n" for row in rows)


if __name__ == "__main__":
    main()
