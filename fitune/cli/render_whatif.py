"""A plan beside what it would be under a change, and how far a card goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fitune.cli.text import columns, short_name, wrapped
from fitune.cli.words import Table, Words
from fitune.planner.sentences import duration, translated
from fitune.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console

WHAT_IF: Table = {
    "what_if": ("What if", "如果改变"),
    "now": ("now", "现在"),
    "fits": ("fits", "放得下"),
    "yes": ("yes", "是"),
    "no": ("no", "否"),
    "base": ("base", "底座格式"),
    "micro": ("micro-batch", "微批"),
    "length": ("length", "长度"),
    "recompute": ("recomputed", "重算层数"),
    "of": ("{n} of {all}", "{n} / {all}"),
    "streamed": ("streamed", "流式层数"),
    "optimizer": ("optimizer", "优化器"),
    "device": ("on", "设备"),
    "needs": ("needs", "需要"),
    "budget": ("budget", "预算"),
    "step": ("a step", "每步"),
    "rate": ("tokens/s", "token/秒"),
    "exact": ("exact", "精确"),
    "cannot": ("{question}: cannot be planned: {why}", "{question}：无法规划：{why}"),
    "would_fit": ("{question} would fit with: {change}", "{question} 这样可行：{change}"),
    "limits": ("How far this card goes, the rest as it is", "其他设置不变时的上限"),
    "seq_len": ("longest record", "最长记录"),
    "micro_batch": ("largest micro-batch", "最大微批"),
    "model": ("largest model", "最大模型"),
    "tokens": ("{n:,} tokens", "{n:,} 个 token"),
    "rows": ("{n:,} rows of {length:,} tokens", "{n:,} 行（每行 {length:,} 个 token）"),
    "none": ("none", "无"),
    "end": (" or more", " 或更多"),
    "model_note": ("largest model: of the dense models that fitune knows by heart",
                   "最大模型：限 fitune 内置的稠密模型"),
    "rope_note": ("longest record: as memory goes; beyond the model's own positions it needs --rope-scaling",
                  "最长记录：仅按显存计算；超出模型位置数时需要 --rope-scaling"),
}  # fmt: skip


def show_what_if(
    console: Console, now: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], lang: str = "en"
) -> None:
    """Prints the plan now and under each change, side by side.

    Args:
        now: what `fitune plan --json` prints. answers: `planner.whatif.WhatIf.as_dict()`.
    """
    from rich.cells import cell_len

    words = Words(lang, WHAT_IF)
    console.print()
    console.print(words("what_if"), markup=False, style="bold")
    planned = [answer for answer in answers if answer["plan"]]
    while planned:
        for count in range(len(planned), 0, -1):  # as many side by side as there is room for
            lines = side_by_side(now, planned[:count], words)
            if count == 1 or max(map(cell_len, lines)) <= console.width:
                break
        for line in lines:
            console.print(line, markup=False)
        planned = planned[count:]
        console.print()
    for line in said(answers, words):
        for part in wrapped(line, console.width):
            console.print(part, markup=False)


def side_by_side(now: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], words: Words) -> list[str]:
    """The plan now and some answers as a table."""
    sides = [facts(side, words) for side in (now, *answers)]
    rows = [(name, *(side[name] for side in sides)) for name in sides[0] if _tells(name, sides, words)]
    heads = ("", words("now"), *(question(answer) for answer in answers))
    return columns([heads, *rows], left=(0,))


def said(answers: Sequence[Mapping[str, Any]], words: Words) -> Iterator[str]:
    """What cannot be planned, and what would fit where nothing does."""
    for answer in answers:
        if answer["problem"]:
            yield words("cannot", question=question(answer), why=translated(answer["problem"], words.lang))
        for entry in answer["nearest_fits"]:
            yield words("would_fit", question=question(answer), change=translated(entry["change"], words.lang))


def question(answer: Mapping[str, Any]) -> str:
    """`seq_len=8192, batch=4`."""
    return ", ".join(f"{name}={'auto' if value is None else value}" for name, value in answer["changes"].items())


def facts(result: Mapping[str, Any], words: Words) -> dict[str, str]:
    """What is compared, in the order in which it is shown."""
    plan, predicted = result["plan"], result["predicted"] or {}
    needs = next((predicted[k] for k in ("device_bytes", "peak_reserved_bytes", "peak_allocated_bytes", "host_bytes")
                  if predicted.get(k)), None)  # fmt: skip
    step_s, rate, resident = predicted.get("step_s"), predicted.get("tokens_per_s"), plan.get("resident_layers")
    streamed = 0 if plan["stream_from"] == "none" or resident is None else plan["num_layers"] - resident
    exact = plan["base_format"] not in ("int8", "nf4", "fp4") and "8bit" not in plan["optimizer"]
    method = "full" if plan["adapter"] is None else f"LoRA r={plan['adapter']['r']}"
    return {
        words("fits"): words("yes" if result["fits"] else "no"),
        words("device"): short_name(plan["device_name"]),
        words("base"): f"{method}, {plan['base_format']}",
        words("exact"): words("yes" if exact and plan["precision"] != "fp16" else "no"),
        words("length"): f"{plan['seq_len']:,}",
        words("micro"): words("of", n=plan["micro_batch"], all=plan["batch"]),
        words("recompute"): words("of", n=plan["recompute_layers"], all=plan["num_layers"]),
        words("streamed"): words("of", n=streamed, all=plan["num_layers"]),
        words("optimizer"): plan["optimizer"],
        words("needs"): "-" if needs is None else format_bytes(needs),
        words("budget"): "-" if plan["budget_bytes"] is None else format_bytes(plan["budget_bytes"]),
        words("step"): "-" if step_s is None else duration(format_duration(step_s), words.lang),
        words("rate"): "-" if rate is None else f"{rate:,.0f}",
    }


ALWAYS = ("fits", "base", "micro", "recompute", "needs", "budget", "step", "rate")


def _tells(name: str, sides: Sequence[Mapping[str, str]], words: Words) -> bool:
    """Rows that are the same on all sides are shown only where one would miss them."""
    return name in {words(key) for key in ALWAYS} or len({side[name] for side in sides}) > 1


def show_limits(console: Console, limits: Sequence[Mapping[str, Any]], lang: str = "en") -> None:
    """Prints `planner.whatif.Limit.as_dict()` of each."""
    words = Words(lang, WHAT_IF)
    console.print()
    console.print(words("limits"), markup=False, style="bold")
    rows = []
    for limit in limits:
        plan = limit["plan"]
        if plan is None:
            rows.append((words(limit["what"]), words("none"), "", ""))
            continue
        if limit["what"] == "seq_len":
            value = words("tokens", n=limit["value"])
        elif limit["what"] == "micro_batch":
            value = words("rows", n=limit["value"], length=plan["seq_len"])
        else:
            value = str(limit["value"])
        value += words("end") if limit["is_end"] and limit["what"] != "model" else ""
        again = words("of", n=plan["recompute_layers"], all=plan["num_layers"])
        rows.append((words(limit["what"]), value, plan["base_format"], f"{words('recompute')} {again}"))
    for line in columns(rows, left=(0, 1, 2, 3)):
        console.print(f"  {line}", markup=False)
    for key in ("rope_note", "model_note"):
        for part in wrapped(words(key), console.width):
            console.print(part, markup=False, style="dim")
