"""A prediction on the terminal: the verdict, where the memory goes, phases, one step, and what would help."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fitune.cli import render, render_needs
from fitune.cli import render_memory as memory
from fitune.cli.words import Words
from fitune.cli.words_predict import BLOCKS, PREDICT
from fitune.memory.groups import group_of, grouped, name_of
from fitune.memory.splice import GRADIENT
from fitune.planner.sentences import translated
from fitune.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STACK_SHOWN = ("base_dtype", "optimizer", "checkpointing", "loss", "attention")  # of what another tool would be told


def show_prediction(console: Console, result: Mapping[str, Any], lang: str = "en") -> None:
    """Prints what `fitune predict --json` prints, for people."""
    words, width = Words(lang, PREDICT), min(console.width, memory.MOST_WIDTH)
    plan = result["plan"]
    for index, line in enumerate(verdict(result, words)):
        console.print(line, markup=False, width=width, style="bold" if not index else "")
    for note in result.get("notes") or []:
        console.print(words("note", note=translated(note, lang)), markup=False, width=width)
    _section(console, words("where"), [breakdown_table(result, words)])
    rows = memory.phase_owners(result)
    budget = plan.get("budget_bytes")
    if rows:
        _section(console, words("phases"), memory.phase_bars(rows, budget, width, words))
        for key_line in memory.legend_lines([owners for _, owners in rows], plan, width, words):
            console.print(key_line)
    for line in elsewhere(result, words):
        console.print(line, markup=False, width=width)
    if result.get("stack_phases"):
        _section(console, words("stack_parts"), [stack_parts_table(result)])
    if result.get("timeline"):
        area = memory.step_area(result["timeline"], step_base(result), budget, width, words)
        _section(console, words("timeline"), area)
        for line in peak_lines(result, words):
            console.print(line, markup=False, width=width)
    if result.get("techniques"):
        _section(console, words("techniques"), [techniques_table(result, words)])
        useless = [translated(t["technique"], lang) for t in result["techniques"] if t["saves_bytes"] <= 0]
        if useless:
            line = words("no_help") + words("colon") + words("semicolon").join(useless)
            console.print(line, markup=False, width=width)
    for line in fitting_lines(result, words):
        console.print(line, markup=False, width=width)


def _section(console: Console, title: str, lines: Sequence[Any]) -> None:
    console.print()
    console.print(title, markup=False, style="bold")
    for line in lines:
        console.print(line)


def verdict(result: Mapping[str, Any], words: Words) -> list[str]:
    """The answer in two lines, and the job in a third."""
    plan, needed = result["plan"], result["needed_bytes"]
    budget = plan.get("budget_bytes")
    verb = words("fits" if result["fits"] else "not_fits")
    stack = f" [{result['stack']}]" if result.get("stack") else ""
    lines = [f"{plan['model']}{stack} {verb} {plan['device_name']}"]
    if budget is not None:
        line = words("needs", needed=format_bytes(needed), budget=format_bytes(budget))
        gap = format_bytes(abs(needed - budget))
        line += words("colon") + (words("left", left=gap) if result["fits"] else words("too_much", excess=gap))
        interval = result.get("interval")
        if interval:
            low, high = (format_bytes(interval[name]) for name in ("low_bytes", "high_bytes"))
            lines += [line, words("between", low=low, high=high) + _doubt(result, words)]
        else:
            lines.append(line)
    lines.append(render.summary(plan, words.lang))
    told = result.get("stack_settings")
    if told:
        shown = (f"{name.replace('_', ' ')} {_setting(name, told[name])}" for name in STACK_SHOWN if told.get(name))
        lines.append(", ".join(shown))
    if speed := render_needs.speed_line(result.get("predicted") or {}, words.lang):
        lines.append(speed)
    return lines


def _setting(name: str, value: str) -> str:
    """A setting of another tool in words; an optimizer's name is what that tool calls it."""
    return value if name == "optimizer" else value.replace("_", " ")


def _doubt(result: Mapping[str, Any], words: Words) -> str:
    """What follows the interval where the budget lies within it."""
    budget, interval = result["plan"]["budget_bytes"], result["interval"]
    if result["fits"] and interval["high_bytes"] > budget:
        return words("colon") + words("may_not_fit")
    if not result["fits"] and interval["low_bytes"] <= budget:
        return words("colon") + words("may_fit")
    return ""


def breakdown_table(result: Mapping[str, Any], words: Words) -> Table:
    """Group, most bytes at any time, bytes at the highest peak; the sum of the last against the budget."""
    from rich.table import Table
    from rich.text import Text

    plan = result["plan"]
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=True)
    table.add_column("")
    for key in ("at_most", "at_peak"):
        table.add_column(words(key), justify="right", no_wrap=True)
    most = grouped({row["owner"]: row["most_bytes"] for row in result["breakdown"]})
    peak = grouped({row["owner"]: row["at_peak_bytes"] for row in result["breakdown"]})
    for key, size in most.items():
        letter = group_of(key).letter
        table.add_row(Text(f"{letter} {name_of(key, plan, words.lang)}"), format_bytes(size), _size(peak.get(key, 0)))
    table.add_row(Text(f"  {words('total')}"), "", Text(format_bytes(sum(peak.values())), style="bold"))
    if plan.get("budget_bytes") is not None:
        table.add_row(Text(f"  {words('budget')}"), "", format_bytes(plan["budget_bytes"]))
    return table


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def elsewhere(result: Mapping[str, Any], words: Words) -> Iterator[str]:
    """RAM, pinned RAM and disk: the most over the phases, where they are computed and not nothing."""
    predicted = result.get("predicted") or {}
    parts = []
    for key, field in (("ram", "host_bytes"), ("pinned", "pinned_bytes"), ("disk", "disk_bytes")):
        size = predicted.get(field)
        if not size or (key == "ram" and result["plan"].get("device") == "cpu"):
            continue
        phase = max((n for n, p in predicted["phases"].items() if p.get(field) is not None),
                    key=lambda n: predicted["phases"][n][field])  # fmt: skip
        parts.append(f"{words(key)} {format_bytes(size)} ({words(phase)})")
    if parts:
        yield words("comma").join(parts)


def step_base(result: Mapping[str, Any]) -> dict[str, int]:
    """What is in use in a step besides what the timeline holds: the context; on the CPU the process."""
    step = ((result.get("predicted") or {}).get("phases") or {}).get("step") or {}
    on_card = (result.get("plan") or {}).get("device") != "cpu"
    owners = step.get("device" if on_card else "host") or {}
    tensors = {owner for moment in result["timeline"] for owner in moment["owners"]}
    return {owner: size for owner, size in owners.items() if owner not in tensors and owner != "allocator"}


def peak_lines(result: Mapping[str, Any], words: Words, count: int = 4) -> list[str]:
    """Where the step is highest, and of each group of owners the largest block that a part makes."""
    timeline = result["timeline"]
    top = max(timeline, key=lambda moment: moment["bytes"])
    base = sum(step_base(result).values())
    place = translated(top["place"], words.lang)
    lines = [words("highest", size=format_bytes(top["bytes"] + base), place=place)]
    largest: dict[str, tuple[int, str, str]] = {}
    for moment in timeline:
        for block in moment["largest"]:
            key = group_of(block["owner"]).key
            if block["num_bytes"] > largest.get(key, (0,))[0]:
                largest[key] = (block["num_bytes"], block["label"], moment["place"])
    ordered = sorted(largest.values(), reverse=True)[:count]
    for size, label, place in ordered:
        lines.append(
            f"  {label_text(label, words.lang)}: {format_bytes(size)}{words('comma')}{translated(place, words.lang)}"
        )
    return lines


_LABEL = re.compile(r"(?P<saved>saved )?(?P<what>.*?)(?P<shape> (\d[\dx]*|scalar) \S+)?")


def label_text(label: str, lang: str) -> str:
    """What a block is, with its shape and format as they are: `保存的矩阵乘积 16384x14336 bf16`."""
    found = _LABEL.fullmatch(label)
    if lang == "en" or found is None:
        return label
    words, what = Words(lang, BLOCKS), found["what"]
    of = what.removeprefix(GRADIENT)
    if what in BLOCKS:
        what = words(what)
    elif of != what:
        what = words("gradient", what=of)
    return (words("saved", what=what) if found["saved"] else what) + (found["shape"] or "")


def stack_parts_table(result: Mapping[str, Any]) -> Table:
    """What another tool allocates in each part of its run."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("")
    table.add_column("", justify="right", no_wrap=True)
    for part, size in result["stack_phases"].items():
        table.add_row(Text(part), format_bytes(size))
    return table


def techniques_table(result: Mapping[str, Any], words: Words) -> Table:
    """Those that take something off, the largest saving first; with which of them the recipe would fit."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for key in ("saves", "then"):
        table.add_column(words(key), justify="right", no_wrap=True)
    if not result["fits"]:
        table.add_column("", no_wrap=True)
    for entry in result["techniques"]:
        if entry["saves_bytes"] <= 0:
            continue
        verb = words("fits_then") if entry["fits"] else ""
        name = translated(entry["technique"], words.lang) + ("" if entry["exact"] else f" ({words('approximate')})")
        row = (Text(name), format_bytes(entry["saves_bytes"]), format_bytes(entry["needs_bytes"]), verb)
        table.add_row(*row[: len(table.columns)])
    return table


def _placed(plan: Mapping[str, Any], words: Words) -> Iterator[str]:
    """What of a plan the card does not hold all the time."""
    count = plan["num_layers"]
    if plan["recompute_layers"]:
        yield words("recomputed", n=plan["recompute_layers"], all=count)
    if plan["stream_from"] != "none" and plan["resident_layers"] is not None:
        yield words("streamed", n=count - plan["resident_layers"], all=count)
    if plan["head_place"] == "host":
        yield words("head_streamed")
    if plan["offload_inputs"]:
        yield words("inputs_offloaded")


def fitting_lines(result: Mapping[str, Any], words: Words) -> Iterator[str]:
    """The plan that fits, or what else would, where the recipe itself does not."""
    if result["fits"]:
        return
    fitting = result.get("fitting")
    yield ""
    if fitting:
        plan, predicted = fitting["plan"], fitting["predicted"]
        needed = predicted.get("device_bytes") or predicted.get("peak_allocated_bytes")
        size = words("colon") + format_bytes(needed) if needed else ""
        title = words("fitting" if not result.get("stack") else "fitting_fitune")
        yield f"{title}{size}"
        yield words("comma").join((f"  {render.summary(plan, words.lang)}", *_placed(plan, words)))
        return
    yield words("none_fits")
    for entry in result.get("nearest_fits") or []:
        text = render.entry_line(entry, words.lang)
        yield f"{words('nearest')}{words('colon')}{text}"
