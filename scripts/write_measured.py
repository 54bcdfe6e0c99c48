"""Write docs/measured.md from the records in benchmarks/results.

python scripts/write_measured.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measured.md"
RESULTS = ROOT / "benchmarks" / "results"
GIB = 1024**3
HEAD = """# Measured

Written by `scripts/write_measured.py` from `benchmarks/results/`, which `benchmarks/gpu_records.py` and
`benchmarks/measure.py` write on any machine with an NVIDIA GPU. Random weights of the true shapes, LoRA on all linear
layers unless named otherwise.
Predicted and measured are peaks of a training step in GiB as torch's allocator counts tensors (`max_memory_allocated`);
reserved is what the allocator took for them, device what the driver counts for the whole card. Tokens/s are the median
of four steps; at 2,048 tokens a step they depend on how fast the host launches kernels (8B NF4, 1 x 2048: 4,223 and
4,870 below; 5,126 to 7,007 were read on other hosts with the same card and not kept), at 8,192 they do not.
"""


def page() -> str:
    """The whole page."""
    text = HEAD
    for path in sorted(RESULTS.glob("*.json")):
        records = json.loads(path.read_text(encoding="utf-8"))
        measured = [r for r in records if "measured" in r and "predicted" in r]
        if not measured:
            continue
        if path.name == "plan-points.json":
            text += points_section(path.name, measured)
            continue
        free = [r for r in measured if not r["cap_bytes"] or "outcome" not in r]
        text += matrix_section(path.name, free) if "-matrix-" in path.name else section(path.name, free)
        if capped := [r for r in measured if "outcome" in r]:
            text += boundary_section(capped)
    for path in sorted((RESULTS / "multi_gpu").glob("alone-*.json")):
        text += alone_section(path.name, json.loads(path.read_text(encoding="utf-8")))
    return text


def made_with(records: list[dict[str, Any]]) -> str:
    """The versions that stand in records."""
    found: dict[str, list[str]] = {}
    for record in records:
        for key, value in record["versions"].items():
            found.setdefault(key, [])
            found[key] += [value] if value not in found[key] else []
    return ", ".join(f"{key} {' and '.join(values)}" for key, values in found.items())


def points_section(name: str, records: list[dict[str, Any]]) -> str:
    """Runs of `benchmarks/plan_points.py`: plans as they were made, below a cap."""
    first = records[0]
    versions = made_with(records)
    lines = [
        f"\n## {first['gpu']['name']}, {first['date']}: plans of a model, a method and a cap\n",
        f"`{name}` (`benchmarks/plan_points.py`): {versions}. A run is what `fitune train` makes of a model, a method "
        "and `--vram`, with rows as long as they can be, an evaluation and a checkpoint; plan and figures were "
        "predicted before it ran. Device is what the driver counts in the whole process, in GiB.\n",
        "| model, method, cap | plan | device predicted | measured | step predicted | measured (s) | outcome |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for r in records:
        # one that does not fit, or broke off, has fewer figures
        said, was = r.get("predicted_before", r["predicted"]), r["measured"]
        step_s, took_s = said.get("step_s"), was.get("step_s")
        sizes = (side.get("device_bytes") for side in (said, was))
        cells = [
            r["name"],
            how(r["plan"]),
            *(f"{size / GIB:.2f}" if size else "-" for size in sizes),
            f"{step_s:.2f}" if step_s else "-",
            f"{took_s:.2f} ({step_s / took_s - 1:+.0%})" if step_s and took_s else "-",
            r["outcome"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def how(plan: dict[str, Any]) -> str:
    """A plan in a few words."""
    parts = [
        f"{plan['base_format']}, {plan['micro_batch']} x {-(-plan['batch'] // plan['micro_batch'])}",
        f"{plan['recompute_layers']} of {plan['num_layers']} recomputed",
    ]
    if plan["stream_from"] != "none":
        parts.append(f"{plan['num_layers'] - plan['resident_layers']} streamed")
    parts += ["inputs in RAM"] * plan["offload_inputs"]
    parts += ["layer by layer"] * (plan["accumulation_order"] == "layer-major")
    parts += ["state in RAM"] * (plan["optimizer_place"] != "device")
    return ", ".join(parts)


def alone_section(name: str, records: list[dict[str, Any]]) -> str:
    """Runs of `benchmarks/multi_gpu.py --alone`: one process in a group beside the plain way."""
    first = records[0]
    versions = made_with(records)
    plain = {r["name"]: r for r in records}
    lines = [
        f"\n## {first['gpu']['name']}, {first['date']}: one process in a group\n",
        f"`multi_gpu/{name}` (`benchmarks/multi_gpu.py run --alone`): {versions}. What a way of sharing costs where "
        "there is nobody to share with: peak of a step's tensors in GiB and speed, beside the plain way in the same "
        "lease.\n",
        "| run | predicted | measured | plain way | tokens/s | of the plain way's |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in records:
        if not r["against"]:
            continue
        other = plain[r["against"]]
        ratio = r["measured"]["tokens_per_s"] / other["measured"]["tokens_per_s"]
        cells = [
            r["name"],
            *(f"{step_bytes(side) / GIB:.3f}" for side in (r["predicted"], r["measured"], other["measured"])),
            f"{r['measured']['tokens_per_s']:,.0f}",
            f"{ratio:.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def matrix_section(name: str, records: list[dict[str, Any]]) -> str:
    """Runs of `benchmarks/measure.py`: how far off the predictions were, then every run."""
    first = records[0]
    versions = made_with(records)
    lines = [
        f"\n## {first['gpu']['name']}, {first['date']}: {len(records)} configurations\n",
        f"`{name}` (`benchmarks/measure.py`): {versions}. Each was predicted before it was run; the commit stands in "
        "its record. Errors of the prediction, over all runs:\n",
        "| | median | 95 % | worst | lowest |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for field, title in (
        ("peak_allocated_bytes", "peak of tensors"),
        ("peak_reserved_bytes", "peak that the allocator holds"),
        ("device_bytes", "what the driver counts"),
    ):
        off = [step_of(r["predicted"])[field] / step_of(r["measured"])[field] - 1 for r in records]
        sizes = sorted(abs(e) for e in off)
        lines.append(
            f"| {title} | {sizes[len(sizes) // 2]:.2%} | {sizes[int(0.95 * len(sizes))]:.2%} | {sizes[-1]:.2%} "
            f"| {min(off):+.2%} |"
        )
    lines += [
        "\n| group | micro-batch x length / batch | recomputed layers | predicted | measured | driver predicted "
        "| driver measured | tokens/s |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in records:
        plan, said, was = r["plan"], step_of(r["predicted"]), step_of(r["measured"])
        cells = [
            r["group"],
            f"{plan['micro_batch']} x {plan['seq_len']} / {plan['batch']}",
            f"{plan['recompute_layers']} of {plan['num_layers']}",
            *(f"{side['peak_allocated_bytes'] / GIB:.3f}" for side in (said, was)),
            *(f"{side['device_bytes'] / GIB:.2f}" for side in (said, was)),
            f"{r['measured']['tokens_per_s']:,.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def boundary_section(records: list[dict[str, Any]]) -> str:
    """Runs below a cap of memory, whose prediction was close to it."""
    lines = [
        "\nRuns under a cap that the driver counts, with lengths whose prediction is close to it. A retry is torch's "
        "allocator giving back what it holds unused, and asking again.\n",
        "| group | cap | rows x length | predicted / cap | says | outcome | retries |",
        "| --- | ---: | --- | ---: | --- | --- | ---: |",
    ]
    for r in records:
        plan = r["plan"]
        cells = [
            r["group"],
            f"{r['cap_bytes'] / GIB:g} GiB",
            f"{plan['micro_batch']} x {plan['seq_len']}",
            f"{r['predicted']['device_bytes'] / r['cap_bytes']:.4f}",
            "fits" if r["predicted_fits"] else "does not fit",
            "ran" if r["outcome"] == "ran" else "out of memory",
            str(r["measured"]["num_alloc_retries"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def step_of(side: dict[str, Any]) -> dict[str, Any]:
    """What is counted in a steady step."""
    found: dict[str, Any] = side["phases"]["step"]
    return found


def section(name: str, records: list[dict[str, Any]]) -> str:
    """One file of records as a table."""
    first = records[0]
    versions = made_with(records)
    errors = [abs(step_bytes(r["predicted"]) / step_bytes(r["measured"]) - 1) for r in records]
    lines = [
        f"\n## {first['gpu']['name']}, {first['date']}\n",
        f"`{name}`: {versions}. Worst error of a step's predicted peak over {len(records)} runs: {max(errors):.2%}.\n",
        "| run | batch x length | micro-batch | recomputed layers | predicted | measured | reserved | device | tokens/s"
        " |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        plan, measured = record["plan"], record["measured"]
        cap = f" (cap {record['cap_bytes'] / GIB:.0f} GiB)" if record["cap_bytes"] else ""
        cells = [
            record["name"] + cap,
            f"{plan['batch']} x {plan['seq_len']}",
            str(plan["micro_batch"]),
            f"{plan['recompute_layers']} of {plan['num_layers']}",
            f"{step_bytes(record['predicted']) / GIB:.3f}",
            f"{step_bytes(measured) / GIB:.3f}",
            f"{measured['peak_reserved_bytes'] / GIB:.2f}",
            f"{measured['device_bytes'] / GIB:.2f}",
            f"{measured['tokens_per_s']:,.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def step_bytes(side: dict[str, Any]) -> int:
    phases = side["phases"]  # a case of one step has no later one
    return int(phases.get("step", phases["first_step"])["peak_allocated_bytes"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 when the page is not what the records say")
    args = parser.parse_args()
    if args.check:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
