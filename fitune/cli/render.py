"""A plan on the terminal: what was decided and why, and the memory of each phase against the budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fitune.cli import render_layouts, render_memory, render_needs
from fitune.cli.text import columns, wrapped
from fitune.cli.words import Words
from fitune.cli.words_plan import PLAN
from fitune.cli.words_predict import PREDICT
from fitune.memory.phases import NAMES
from fitune.planner.sentences import duration, translated
from fitune.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console

BAR_WIDTH = 24


def show_plan(console: Console, result: dict[str, Any], lang: str = "en") -> None:
    """Prints a plan: first what a person asks (does it fit, what is trained, how long, what else it takes), then why.

    Args:
        console: where to.
        result: what `fitune plan --json` prints (`PlanResult.as_dict()`).
    """
    words, width = Words(lang, PLAN), min(console.width, render_memory.MOST_WIDTH)
    plan = result.get("plan") or {}

    def say(text: str, style: str = "") -> None:
        for line in wrapped(text, width):
            console.print(line, markup=False, style=style)

    say(headline(result, lang), "bold")
    if plan:
        say(summary(plan, lang))
    for text in (speed_line(result.get("predicted") or {}, lang), render_needs.needs_line(result, lang)):
        if text:
            say(text)
    for note in result.get("notes") or []:
        say(words("note", note=translated(note, lang)))
    if result.get("reasons"):
        console.print()
    for line, style in [*decision_lines(result, width, lang), *render_layouts.lines(result, width, lang)]:
        console.print(line, markup=False, style=style)
    show_phases(console, result, lang)
    for title, entries in (("would_fit", result.get("nearest_fits")), ("also_fits", result.get("alternatives"))):
        for entry in entries or []:
            say(words(title, text=entry_line(entry, lang)))


def show_phases(console: Console, result: Mapping[str, Any], lang: str = "en") -> None:
    """A bar per phase: by owner where the plan says whose the bytes are, else their sum."""
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
    if phases:
        console.print()
        for text in memory_lines(phases, plan.get("budget_bytes"), lang):
            console.print(text, markup=False)


def headline(result: Mapping[str, Any], lang: str = "en") -> str:
    """`smollm2 fits on NVIDIA H200: 6.65 GiB of 10.00 GiB`, or what it needs and what there is."""
    words, plan = Words(lang, PLAN), result.get("plan") or {}
    fits = bool(result.get("fits"))
    line = words("fits" if fits else "not_fits", model=plan.get("model", "?"), place=render_layouts.place(result))
    if fits and plan.get("shares"):
        return line + words("peak", needed=" + ".join(map(render_layouts.needs, plan["shares"])))
    needed, budget = _needed_bytes(result), plan.get("budget_bytes")
    if needed is None:
        return line
    each = words("each") if (plan.get("world_size") or 1) > 1 else ""
    key = ("peak" if fits else "needs") + ("_of" if budget else "")
    return line + words(key, needed=format_bytes(needed), budget=format_bytes(budget or 0), each=each)


def _needed_bytes(result: Mapping[str, Any]) -> int | None:
    """What the driver counts; where no replay has told that, what the bars of the phases show."""
    predicted = result.get("predicted") or {}
    if predicted.get("device_bytes") is not None:
        return int(predicted["device_bytes"])
    sums = [sum(owners.values()) for _, owners in render_memory.phase_owners(result)]
    return max(sums) if sums else peak_bytes(predicted)


def summary(plan: Mapping[str, Any], lang: str = "en") -> str:
    """The job in one line: method, base, precision, batch, length."""
    words, adapter = Words(lang, PLAN), plan.get("adapter")
    method = words("full") if plan.get("method") == "full" else "LoRA"
    if adapter:
        method = ("DoRA" if adapter.get("dora") else "LoRA") + f" r={adapter['r']}"
    base = str(plan.get("base_format"))
    article = "a" if base == "bf16" else "an"  # all others begin with a vowel: fp16, int8, nf4
    if base in ("nf4", "fp4") and plan.get("double_quant"):
        base += words("double")
    micro, batch = plan.get("micro_batch"), plan.get("batch")
    steps = words("batch", batch=batch)
    if micro and batch:
        steps = render_needs.batch_text(plan, lang)
    return words("job", method=method, article=article, base=base, precision=plan.get("precision"), steps=steps,
                 seq_len=plan.get("seq_len"))  # fmt: skip


def decision_lines(result: Mapping[str, Any], width: int, lang: str = "en") -> list[tuple[str, str]]:
    """(line, style): decision, value, exact or approximate; below it why."""
    reasons = result.get("reasons") or []
    if not reasons:
        return []
    words = Words(lang, PLAN)
    rows, whys = [(words("decision"), words("value"), words("exact"))], [""]
    for reason in reasons:
        exact = words("yes" if reason.get("exact", True) else "approximate")
        rows.append((translated(reason["decision"], lang), translated(str(reason.get("value", "")), lang), exact))
        whys.append(translated(reason["why"], lang))
    lines = []
    for i, (line, why) in enumerate(zip(columns(rows, left=(0, 1, 2)), whys, strict=True)):
        lines.append((line, "" if i else "bold"))
        lines += [(f"    {part}", "dim") for part in wrapped(why, width - 4)] if why else []
    return lines


def phase_rows(result: Mapping[str, Any]) -> list[tuple[str, int | None, int | None]]:
    """(phase, device bytes, host bytes) of the phases for which something is predicted, in the order they happen."""
    phases = (result.get("predicted") or {}).get("phases") or {}
    rows = []
    for name in [*NAMES, *(name for name in phases if name not in NAMES)]:
        fields = phases.get(name) or {}
        device, host = peak_bytes(fields), fields.get("host_bytes")
        if device is not None or host is not None:
            rows.append((name, device, host))
    return rows


def memory_lines(
    rows: list[tuple[str, int | None, int | None]], budget_bytes: int | None, lang: str = "en"
) -> list[str]:
    """Predicted memory of each phase with a bar; the bar's full width is the budget, or the largest phase."""
    words, names = Words(lang, PLAN), Words(lang, PREDICT)
    full = budget_bytes or max((device or 0 for _, device, _ in rows), default=0)
    has_host = any(host is not None for _, _, host in rows)
    scale = words("of", budget=format_bytes(budget_bytes)) if budget_bytes else ""
    cells = [(words("phase"), words("memory"), scale, words("host"))[: 3 + has_host]]
    for phase, device, host in rows:
        sizes = ["" if value is None else format_bytes(value) for value in (device, host)]
        cells.append((names(phase), sizes[0], bar(device, full), sizes[1])[: 3 + has_host])
    return columns(cells, left=(0, 2))


def bar(num_bytes: int | None, full_bytes: int, width: int = BAR_WIDTH) -> str:
    """`######----` in block characters; a value over the full width ends in `>`."""
    if num_bytes is None or full_bytes <= 0:
        return ""
    cells = round(width * num_bytes / full_bytes)
    if num_bytes > full_bytes:
        return "█" * (width - 1) + ">"
    return "█" * cells + "░" * (width - cells)


def peak_bytes(fields: Mapping[str, Any]) -> int | None:
    """The most telling figure there is: as the driver counts it, else reserved, else allocated."""
    for name in ("device_bytes", "peak_reserved_bytes", "peak_allocated_bytes"):
        if fields.get(name) is not None:
            return int(fields[name])
    return None


def speed_line(predicted: Mapping[str, Any], lang: str = "en") -> str:
    """Step time and tokens/s where they are predicted."""
    if line := render_needs.speed_line(predicted, lang):
        return line
    words, step_s, rate = Words(lang, PLAN), predicted.get("step_s"), predicted.get("tokens_per_s")
    if step_s is None:
        return ""
    plain = words("a_step", time=duration(format_duration(step_s), lang))
    return plain + (words("rate", rate=f"{rate:,.0f}") if rate else "")


def entry_line(entry: Mapping[str, Any], lang: str = "en") -> str:
    """One alternative or nearest fit: a sentence, or a plan with its predicted peak."""
    if isinstance(entry.get("change"), str):
        options = " ".join(
            f"--{name.replace('_', '-')} {f'{value:g}' if isinstance(value, float) else value}"
            for name, value in (entry.get("setting") or {}).items()
            if value is not None and name != "model"
        )  # fmt: skip
        text = translated(entry["change"], lang)
        return text if not options or options in text else text + (": " if lang == "en" else "：") + options
    why = translated(str(entry.get("why") or ""), lang)
    between = "; " if lang == "en" else "；"
    return render_needs.how_line(entry, lang) + (between + why if why else "")
