"""Several GPUs on the terminal: which they are, and each way of working together with what it would take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fitune.cli.text import columns, wrapped
from fitune.planner.sentences import duration, translated
from fitune.units import format_bytes, format_duration

_HEADINGS = {
    "en": ("layout", "GPUs", "base", "per GPU", "a step", "tokens/s"),
    "zh": ("并行方式", "GPU", "底座", "每块 GPU", "每步", "token/s"),
}


def place(result: Mapping[str, Any]) -> str:
    """`2 x GeForce RTX 3090`, `GeForce RTX 3090 + GeForce RTX 4070`, or the one device of a plan."""
    plan = result.get("plan") or {}
    one = plan.get("device_name") or plan.get("device") or "this machine"
    row = next((row for row in result.get("layouts") or [] if row.get("chosen")), None)
    names = (row or {}).get("cards") or [one] * (plan.get("world_size") or 1)
    parts = [f"{count} x {name}" if count > 1 else str(name) for name, count in Counter(names).items()]
    return " + ".join(parts)


def lines(result: Mapping[str, Any], width: int, lang: str) -> list[tuple[str, str]]:
    """(line, style): a line for each way that was looked at, the chosen one first, and below it why."""
    rows: list[Mapping[str, Any]] = list(result.get("layouts") or [])
    if not rows:
        return []
    cells = [_HEADINGS[lang]]
    for row in rows:
        step, rate = row.get("step_s"), row.get("tokens_per_s")
        cells.append((
            ("* " if row["chosen"] else "  ") + row["layout"],
            str(row.get("num_gpus") or ""),
            str(row.get("base_format") or ""),
            _bytes(row.get("needed_bytes")),
            duration(format_duration(step), lang) if step is not None else "",
            f"{rate:,.0f}" if rate is not None else "",
        ))  # fmt: skip
    whys = ["", *(translated(str(row.get("why") or ""), lang) for row in rows)]
    made = []
    for i, (line, why) in enumerate(zip(columns(cells, left=(0, 2)), whys, strict=True)):
        made.append((line, "" if i else "bold"))
        made += [(f"    {part}", "dim") for part in wrapped(why, width - 4)] if why else []
    host = next((row.get("host_bytes") for row in rows if row["chosen"]), None)
    if host is not None:
        text = f"RAM of each machine: {format_bytes(host)}" if lang == "en" else f"每台机器的内存：{format_bytes(host)}"
        made.append((text, ""))
    return made


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)
