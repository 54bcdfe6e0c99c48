"""A plan on the terminal in a language: English as `cli.render` prints it, Chinese with the same parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fitune.cli import render, render_layouts, render_needs
from fitune.cli.text import columns, wrapped
from fitune.planner.sentences import duration, translated
from fitune.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console

MOST_WIDTH = 110


def show_plan(console: Console, result: dict[str, Any], lang: str = "en") -> None:
    """Prints what `fitune plan --json` prints (`PlanResult.as_dict()`)."""
    if lang == "en":
        render.show_plan(console, result)
        return
    plan, width = result["plan"], min(console.width, MOST_WIDTH)

    def say(text: str, **style: str) -> None:
        for line in wrapped(text, width):
            console.print(line, markup=False, **style)  # type: ignore[arg-type]

    say(headline(result), style="bold")
    if needs := render_needs.needs_line(result, lang):
        say(needs)
    for note in result.get("notes") or []:
        say(f"注：{translated(note, lang)}")
    say(summary(plan))
    console.print()
    for line, style in decision_lines(result, width, lang):
        console.print(line, markup=False, style=style)
    for line, style in render_layouts.lines(result, width, lang):
        console.print(line, markup=False, style=style)
    render.show_phases(console, result, lang)
    predicted = result.get("predicted") or {}
    if predicted.get("step_s") is not None:
        rate = predicted.get("tokens_per_s")
        plain = f"每步约 {duration(format_duration(predicted['step_s']), lang)}"
        say(render_needs.speed_line(predicted, lang) or plain + (f"，每秒 {rate:,.0f} 个 token" if rate else ""))
    for title, entries in (("可行的改动", result.get("nearest_fits")), ("另一可行计划", result.get("alternatives"))):
        for entry in entries or []:
            say(f"{title}：{entry_text(entry, lang)}")


def headline(result: Mapping[str, Any]) -> str:
    """`smollm2 可以放入 H200：峰值 6.65 GiB，预算 10.00 GiB`."""
    plan = result["plan"]
    place = render_layouts.place(result)
    needed, budget = render.peak_bytes(result.get("predicted") or {}), plan.get("budget_bytes")
    line = f"{plan['model']} {'可以放入' if result['fits'] else '放不进'} {place}"
    if needed is None:
        return line
    return f"{line}：峰值 {format_bytes(needed)}" + (f"，预算 {format_bytes(budget)}" if budget else "")


def summary(plan: Mapping[str, Any]) -> str:
    """The job in one line: method, base, precision, batch, length."""
    adapter = plan.get("adapter")
    method = "全参数微调" if not adapter else ("DoRA" if adapter.get("dora") else "LoRA") + f" r={adapter['r']}"
    base = f"{plan['base_format']}"
    if base in ("nf4", "fp4") and plan.get("double_quant"):
        base += "（双重量化）"
    micro, batch = plan["micro_batch"], plan["batch"]
    steps = f"批大小 {batch}" + (f"（{micro} x {-(-batch // micro)}）" if micro != batch else "")
    return f"{method}，底座 {base}，{plan['precision']}，{steps}，最长 {plan['seq_len']} 个 token"


def decision_lines(result: Mapping[str, Any], width: int, lang: str) -> list[tuple[str, str]]:
    """(line, style): decision, value, exact or approximate; below it why."""
    rows = [("决定", "取值", "精确")]
    whys = [""]
    for reason in result.get("reasons") or []:
        exact = "是" if reason.get("exact", True) else "近似"
        rows.append((translated(reason["decision"], lang), translated(str(reason["value"]), lang), exact))
        whys.append(translated(reason["why"], lang))
    lines = []
    for i, (line, why) in enumerate(zip(columns(rows, left=(0, 1, 2)), whys, strict=True)):
        lines.append((line, "" if i else "bold"))
        lines += [(f"    {part}", "dim") for part in wrapped(why, width - 4)] if why else []
    return lines


def entry_text(entry: Mapping[str, Any], lang: str) -> str:
    """An alternative, or what would fit."""
    if isinstance(entry.get("change"), str):
        return translated(entry["change"], lang)
    return render_needs.how_line(entry, lang)
