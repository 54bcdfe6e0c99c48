"""A plan on the terminal: what was decided and why, and the memory of each phase against the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fitune.cli import render_layouts, render_memory, render_needs
from fitune.cli.words import Words
from fitune.cli.words_predict import PREDICT
from fitune.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BAR_WIDTH = 24
_PHASES = {
    "load": "load", "first_step": "first step", "step": "step", "eval": "evaluation", "save": "save",
    "merge": "merge", "resume": "resume",
}  # fmt: skip


def show_plan(console: Console, result: dict[str, Any]) -> None:
    """Prints a plan.

    Args:
        console: where to.
        result: what `fitune plan --json` prints (`PlanResult.as_dict()`).
    """
    plan = result.get("plan") or {}
    console.print(headline(result), markup=False, style="bold")
    if needs := render_needs.needs_line(result, "en"):
        console.print(needs, markup=False)
    for note in result.get("notes") or []:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    if plan:
        console.print(_text(summary(plan)))
    if result.get("reasons"):
        console.print()
        console.print(decisions_table(result["reasons"]))
    for line, style in render_layouts.lines(result, min(console.width, render_memory.MOST_WIDTH), "en"):
        console.print(line, markup=False, style=style)
    show_phases(console, result)
    for line in speed_lines(result.get("predicted") or {}):
        console.print(line, markup=False)
    for title, entries in (("Would fit", result.get("nearest_fits")), ("Also fits", result.get("alternatives"))):
        for entry in entries or []:
            console.print(f"{title}: {entry_line(entry)}", markup=False, soft_wrap=True)


def show_phases(console: Console, result: dict[str, Any], lang: str = "en") -> None:
    """A bar per phase: by owner where the plan says whose the bytes are, else their sum (in English only)."""
    plan = result.get("plan") or {}
    rows = render_memory.phase_owners(result)
    if rows:
        words, width = Words(lang, PREDICT), min(console.width, render_memory.MOST_WIDTH)
        console.print()
        for line in render_memory.phase_bars(rows, plan.get("budget_bytes"), width, words):
            console.print(line)
        for line in render_memory.legend_lines([owners for _, owners in rows], plan, width, words):
            console.print(line)
        return
    phases = phase_rows(result)
    if phases and lang == "en":
        console.print()
        console.print(memory_table(phases, plan.get("budget_bytes")))


def headline(result: dict[str, Any]) -> str:
    """`smollm2 fits on NVIDIA H200: 6.65 GiB of 10.00 GiB`, or what it needs and what there is."""
    plan = result.get("plan") or {}
    model, place = plan.get("model", "the model"), render_layouts.place(result)
    verb = "fits" if result.get("fits") else "does not fit"
    needed, budget = peak_bytes(result.get("predicted") or {}), plan.get("budget_bytes")
    line = f"{model} {verb} on {place}"
    each = " on each" if (plan.get("world_size") or 1) > 1 else ""
    if needed is None:
        return line
    if not result.get("fits"):
        return f"{line}: it needs {format_bytes(needed)}{each}" + (
            f", there are {format_bytes(budget)}" if budget else ""
        )
    return f"{line}: {format_bytes(needed)}" + (f" of {format_bytes(budget)}" if budget else "") + f"{each} at the peak"


def summary(plan: dict[str, Any]) -> str:
    """The job in one line: method, base, precision, batch, length."""
    adapter = plan.get("adapter")
    method = "full fine-tuning" if plan.get("method") == "full" else "LoRA"
    if adapter:
        method = ("DoRA" if adapter.get("dora") else "LoRA") + f" r={adapter['r']}"
    base = plan.get("base_format")
    if base in ("nf4", "fp4") and plan.get("double_quant"):
        base = f"{base} (double quantisation)"
    micro, batch = plan.get("micro_batch"), plan.get("batch")
    steps = f"batch {batch}"
    if micro and batch and micro != batch:
        steps += f" as {micro} x {-(-batch // micro)}"
    article = "a" if base == "bf16" else "an"  # all others begin with a vowel: fp16, int8, nf4
    return f"{method} on {article} {base} base, {plan.get('precision')}, {steps}, up to {plan.get('seq_len')} tokens"


def decisions_table(reasons: list[dict[str, Any]]) -> Table:
    """Decision, value, exact or approximate, why."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, options in (("decision", {"no_wrap": True}), ("value", {"overflow": "fold"}), ("exact", {}),
                             ("why", {"ratio": 1})):  # fmt: skip
        table.add_column(heading, **options)  # type: ignore[arg-type]
    for reason in reasons:
        exact = "yes" if reason.get("exact", True) else "approx."
        table.add_row(*map(_text, (reason["decision"], reason.get("value", ""), exact, reason["why"])))
    return table


def phase_rows(result: dict[str, Any]) -> list[tuple[str, int | None, int | None]]:
    """(phase, device bytes, host bytes) of the phases for which something is predicted, in the order they happen."""
    phases = (result.get("predicted") or {}).get("phases") or {}
    rows = []
    for name in [*_PHASES, *(name for name in phases if name not in _PHASES)]:
        fields = phases.get(name) or {}
        device, host = peak_bytes(fields), fields.get("host_bytes")
        if device is not None or host is not None:
            rows.append((_PHASES.get(name, name), device, host))
    return rows


def memory_table(rows: list[tuple[str, int | None, int | None]], budget_bytes: int | None) -> Table:
    """Predicted memory of each phase with a bar; the bar's full width is the budget, or the largest phase."""
    from rich.table import Table

    full = budget_bytes or max((device or 0 for _, device, _ in rows), default=0)
    scale = f"of {format_bytes(budget_bytes)}" if budget_bytes else ""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("phase", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column(scale, no_wrap=True)
    has_host = any(host is not None for _, _, host in rows)
    if has_host:
        table.add_column("host RAM", justify="right", no_wrap=True)
    for phase, device, host in rows:
        over = bool(budget_bytes and device and device > budget_bytes)
        cells = ["" if value is None else format_bytes(value) for value in (device, host)]
        table.add_row(phase, cells[0], _text(bar(device, full), "red" if over else ""), *cells[1 : 1 + has_host])
    return table


def bar(num_bytes: int | None, full_bytes: int, width: int = BAR_WIDTH) -> str:
    """`######----` in block characters; a value over the full width ends in `>`."""
    if num_bytes is None or full_bytes <= 0:
        return ""
    cells = round(width * num_bytes / full_bytes)
    if num_bytes > full_bytes:
        return "█" * (width - 1) + ">"
    return "█" * cells + "░" * (width - cells)


def peak_bytes(fields: dict[str, Any]) -> int | None:
    """The most telling figure there is: as the driver counts it, else reserved, else allocated."""
    for name in ("device_bytes", "peak_reserved_bytes", "peak_allocated_bytes"):
        if fields.get(name) is not None:
            return int(fields[name])
    return None


def speed_lines(predicted: dict[str, Any]) -> list[str]:
    """Step time and tokens/s where they are predicted."""
    if line := render_needs.speed_line(predicted, "en"):
        return [line]
    step_s, rate = predicted.get("step_s"), predicted.get("tokens_per_s")
    if step_s is None:
        return []
    return [f"about {format_duration(step_s)} a step" + (f", {rate:,.0f} tokens/s" if rate else "")]


def entry_line(entry: Any) -> str:
    """One alternative or nearest fit: a sentence, or a plan with its predicted peak."""
    if isinstance(entry, str):
        return entry
    for name in ("what", "text", "change"):
        if isinstance(entry.get(name), str):
            return str(entry[name])
    return render_needs.how_line(entry, "en")


def _text(text: Any, style: str = "") -> Any:
    """Plain text for rich: square brackets in a path or a reason are no markup."""
    from rich.text import Text

    return Text(str(text), style=style)
