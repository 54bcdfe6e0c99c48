"""The techniques of a plan: what each saves in this job, how it works and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fitune.cli.text import columns, wrapped
from fitune.cli.words import Table, Words
from fitune.planner.techniques_list import BY_KEY
from fitune.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

MOST_WIDTH = 110
WORTH_BYTES = 1 << 20  # less than a MiB is nothing
TECHNIQUES: Table = {
    "title": ("Techniques of this plan, and what each saves here", "本计划用到的技术及其在此节省的显存"),
    "legend": ("Without that technique alone the plan would need as much more; figures do not add up. ~: by formula",
               "仅去掉该项技术时计划会多需要的量；各项不可相加。~：按公式计算"),
    "others": ("Not used here; what they would take off", "此处未用的技术及其可节省的量"),
    "nothing": ("no memory", "不省显存"),
    "costs": ("costs", "代价"),
    "exact": ("exact", "精确"),
    "approximate": ("approximate", "近似"),
    "other": ("another method", "另一种方法"),
    "gpus": ("on {n} GPUs", "{n} 块 GPU"),
    "itself": ("by itself, where it helps", "需要时自动采用"),
    "colon": (": ", "："),
    "more": ("How each works, with sources: docs/techniques/", "各技术的原理与出处：docs/techniques/"),
}  # fmt: skip


def show_techniques(console: Console, effects: Sequence[Mapping[str, Any]], lang: str = "en") -> None:
    """Prints `planner.effects.Effect.as_dict()` of each: those in use at length, the others in a line."""
    words, width = Words(lang, TECHNIQUES), min(console.width, MOST_WIDTH)
    console.print()
    console.print(words("title"), markup=False, style="bold")
    used = [effect for effect in effects if effect["used"]]
    names = [BY_KEY[effect["technique"]].text("name", lang) for effect in used]
    sizes = [size_text(effect) or words("nothing") for effect in used]
    rows = list(zip(names, sizes, (words(effect["exact"]) for effect in used), strict=True))
    for effect, line in zip(used, columns(rows, left=(0, 2)) if rows else [], strict=True):
        technique = BY_KEY[effect["technique"]]
        console.print(line, markup=False, style="bold")
        for part in wrapped(technique.text("how", lang), width - 4):
            console.print(f"    {part}", markup=False)
        for part in wrapped(f"{words('costs')}{words('colon')}{technique.text('costs', lang)}", width - 4):
            console.print(f"    {part}", markup=False, style="dim")
    for part in wrapped(words("legend"), width):
        console.print(part, markup=False, style="dim")
    rest = [e for e in effects if not e["used"] and (e["saves_bytes"] or 0) >= WORTH_BYTES]
    if rest:
        console.print()
        console.print(words("others"), markup=False, style="bold")
        lines = []
        for e in rest:
            how = e["setting"] or words("itself")
            gpus = f" ({words('gpus', n=e['num_gpus'])})" if e["num_gpus"] else ""
            lines.append((BY_KEY[e["technique"]].text("name", lang) + gpus, size_text(e), words(e["exact"]), how))
        for line in columns(lines, left=(0, 2, 3)):
            console.print(f"  {line}", markup=False)
    console.print(words("more"), markup=False, style="dim")


def size_text(effect: Mapping[str, Any]) -> str:
    """`4.20 GiB`, `~1.10 GiB` by formula; empty where it saves none."""
    saved = effect["saves_bytes"]
    if saved is None or abs(saved) < WORTH_BYTES:
        return ""
    return ("~" if effect["basis"] == "formula" else "") + format_bytes(saved)
