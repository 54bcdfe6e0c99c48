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
_OF_GPU = {
    "en": ("  GPU", "share", "micro-batch", "recomputed", "needs / budget", "a step"),
    "zh": ("  显卡", "份额", "微批", "重算层数", "需要 / 预算", "每步"),
}


def place(result: Mapping[str, Any]) -> str:
    """`2 x GeForce RTX 3090`, `GeForce RTX 3090 + GeForce RTX 4070`, or the one device of a plan."""
    plan = result.get("plan") or {}
    one = plan.get("device_name") or plan.get("device") or "this machine"
    # where nothing fits no way is chosen: that of the plan which is shown
    rows = sorted(result.get("layouts") or [], key=lambda row: not row.get("chosen"))
    row = next((row for row in rows if row.get("chosen") or row.get("layout") == plan.get("parallel")), None)
    names = (row or {}).get("cards") or [one] * (plan.get("world_size") or 1)
    parts = [f"{count} x {name}" if count > 1 else str(name) for name, count in Counter(names).items()]
    return " + ".join(parts)


def lines(result: Mapping[str, Any], width: int, lang: str) -> list[tuple[str, str]]:
    """(line, style): a line for each way that was looked at, the chosen one first, and below it why."""
    told: list[Mapping[str, Any]] = list(result.get("layouts") or [])
    if not told:
        return []
    more = [row for row in told if _is_more(row)]
    rows = [row for row in told if not _is_more(row)]
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
    # of a way that needs too much its size says why
    whys = ["", *("" if _is_too_large(row) else translated(str(row.get("why") or ""), lang) for row in rows)]
    made = []
    for i, (line, why) in enumerate(zip(columns(cells, left=(0, 2)), whys, strict=True)):
        made.append((line, "" if i else "bold"))
        made += [(f"    {part}", "dim") for part in wrapped(why, width - 4)] if why else []
    if more:
        parts = (f"{row['layout']} {translated(row['why'].partition('; ')[2], lang)}".strip() for row in more)
        accepts = translated(more[0]["why"].partition("; ")[0], lang)
        text = (": " if lang == "en" else "：").join((accepts, (", " if lang == "en" else "，").join(parts)))
        made += [(f"  {part}" if not i else f"    {part}", "dim") for i, part in enumerate(wrapped(text, width - 4))]
    made += share_lines(result.get("plan") or {}, lang)
    host = next((row.get("host_bytes") for row in rows if row["chosen"]), None)
    if host is not None:
        text = f"RAM of each machine: {format_bytes(host)}" if lang == "en" else f"每台机器的内存：{format_bytes(host)}"
        made.append((text, ""))
    return made


def _is_more(row: Mapping[str, Any]) -> bool:
    """A way that fits and is more complex than the person accepts."""
    return bool(row.get("fits")) and str(row.get("why") or "").startswith("more than --effort")


def _is_too_large(row: Mapping[str, Any]) -> bool:
    return not row.get("fits") and row.get("needed_bytes") is not None and "needs at least" in str(row.get("why"))


def share_lines(plan: Mapping[str, Any], lang: str) -> list[tuple[str, str]]:
    """(line, style): a line for each GPU of a plan whose GPUs are not alike."""
    shares = plan.get("shares") or []
    if not shares:
        return []
    cells = [_OF_GPU[lang]]
    for rank, share in enumerate(shares):
        part = f"{share['records']} / {plan['batch']}"
        if plan.get("stages"):
            part = translated(f"{plan['stages'][rank]} layers", lang)
        step = share.get("step_s")
        cells.append((
            f"  {rank} {share['card']}", part, str(share["micro_batch"]), str(share["recompute_layers"]),
            needs(share), duration(format_duration(step), lang) if step is not None else "",
        ))  # fmt: skip
    return [(line, "" if i else "bold") for i, line in enumerate(columns(cells, left=(0,)))]


def needs(share: Mapping[str, Any]) -> str:
    """`10.90 GiB / 11.58 GiB`: what a GPU needs, and its budget."""
    needed, budget = share.get("needed_bytes"), share.get("budget_bytes")
    return " / ".join(format_bytes(value) for value in (needed, budget) if value is not None)


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)
