"""Memory predicted against memory measured: the numbers of both, and the report's section on them."""

from __future__ import annotations

from html import escape
from typing import Any

from fitune.memory.groups import group_of, grouped, legend, name_of
from fitune.train.events import number
from fitune.train.report_text import Words
from fitune.units import format_bytes

FIELDS = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes")
PHASES = ("load", "first_step", "step", "eval", "save", "merge", "resume")
_WIDEST = 0.80  # share of the track that the longest bar takes, so that its number fits beside it

Peaks = dict[str, dict[str, float | None]]


def measured_peaks(events: list[dict[str, Any]]) -> Peaks:
    """Highest measured bytes per phase and field, over all phase events and, for `step`, the steps' own peaks."""
    peaks: Peaks = {}
    for event in events:
        kind = event.get("event")
        if kind not in ("phase", "step"):
            continue
        phase = peaks.setdefault(str(event.get("phase")) if kind == "phase" else "step", dict.fromkeys(FIELDS))
        for field in FIELDS:
            found, known = number(event.get(field)), phase[field]
            if found is not None and (known is None or found > known):
                phase[field] = found
    return peaks


def predicted_peaks(plan: dict[str, Any]) -> Peaks:
    """Predicted bytes per phase and field out of `plan.json`; None where the plan does not say."""
    predicted = plan.get("predicted")
    phases = predicted.get("phases") if isinstance(predicted, dict) else None
    if not isinstance(phases, dict):
        return {}
    return {str(p): {f: number(v.get(f)) for f in FIELDS} for p, v in phases.items() if isinstance(v, dict)}


def main_field(predicted: Peaks, measured: Peaks) -> str | None:
    """The field worth a chart: the first that is both predicted and measured, else measured, else predicted."""

    def has(peaks: Peaks, field: str) -> bool:
        return any(phase.get(field) is not None for phase in peaks.values())

    both = [f for f in FIELDS if has(predicted, f) and has(measured, f)]
    either = [f for f in FIELDS if has(measured, f)] + [f for f in FIELDS if has(predicted, f)]
    return next(iter(both + either), None)


def memory_section(plan: dict[str, Any], events: list[dict[str, Any]], words: Words) -> str:
    """Bars per phase for the main field and a table of all fields; a null is "not computed", never 0."""
    predicted, measured = predicted_peaks(plan), measured_peaks(events)
    field = main_field(predicted, measured)
    if field is None:
        return f'<p class="muted">{escape(words("no_memory"))}</p>'
    budget = number(plan.get("budget_bytes")) if field != "host_bytes" else None
    phases = [p for p in PHASES if p in predicted or p in measured]
    phases += [p for p in [*predicted, *measured] if p not in PHASES and p not in phases]
    text = f"<p>{escape(words('memory_text'))}"
    if budget is not None:
        text += f" {escape(words('budget_text', budget=format_bytes(budget)))}"
    return (
        f"{text}</p>{owners_chart(plan, words)}{_bars(phases, field, predicted, measured, budget, words)}"
        f"{_table(phases, (field,), predicted, measured, words)}"
        f'<p class="note">{escape(words("difference_text"))}</p>'
        f"<details><summary>{escape(words('all_memory'))}</summary>"
        f"{_table(phases, FIELDS, predicted, measured, words)}</details>"
    )


def owners_chart(plan: dict[str, Any], words: Words) -> str:
    """Predicted bytes of each phase by owner, as stacked bars with the budget; nothing where the plan does not say."""
    predicted = plan.get("predicted")
    phases = predicted.get("phases") if isinstance(predicted, dict) else None
    device = "host" if plan.get("device") == "cpu" else "device"
    rows = []
    for name in PHASES:
        found = phases.get(name) if isinstance(phases, dict) else None
        owners = found.get(device) if isinstance(found, dict) else None
        if isinstance(owners, dict) and owners:
            rows.append((name, {str(k): int(v) for k, v in owners.items() if isinstance(v, int)}))
    if not rows:
        return ""
    most = max(sum(owners.values()) for _, owners in rows)
    budget = number(plan.get("budget_bytes"))
    shown_limit = budget if budget is not None and budget <= 3 * most else None
    whole = max(most, shown_limit or 0.0) / _WIDEST
    limit = "" if shown_limit is None else f'<b class="limit" style="left:{shown_limit / whole * 100:.2f}%"></b>'
    bars = ""
    for name, owners in rows:
        total = format_bytes(sum(owners.values()))
        bars += (
            f'<div class="phase">{escape(words.known(name, "phase_"))}</div><div class="track"><div class="bar">'
            f"{_segments(owners, whole, plan, words)}<span>{total}</span></div>{limit}</div>"
        )
    keys = {key for _, owners in rows for key in grouped(owners)}
    swatches = "".join(
        f'<li><i class="swatch" style="background:{group.fill}"></i>{escape(name)}</li>'
        for group, name in legend(keys, plan, words.lang)
    )
    title = escape(words("predicted_owners"))
    return (
        f'<figure class="chart owners"><figcaption><span class="chart-title">{title}</span>'
        f'<ul class="legend">{swatches}</ul></figcaption><div class="bars">{bars}</div></figure>'
    )


def _segments(owners: dict[str, int], whole: float, plan: dict[str, Any], words: Words) -> str:
    parts = []
    for key, size in grouped(owners).items():
        title = escape(f"{name_of(key, plan, words.lang)}: {format_bytes(size)}", quote=True)
        style = f"width:{size / whole * 100:.2f}%;background:{group_of(key).fill}"
        parts.append(f'<i style="{style}" title="{title}"></i>')
    return "".join(parts)


def _bars(phases: list[str], field: str, predicted: Peaks, measured: Peaks, budget: float | None, words: Words) -> str:
    values = [peaks.get(p, {}).get(field) or 0.0 for p in phases for peaks in (predicted, measured)]
    longest = max(values) or 1.0
    is_near = budget is not None and budget <= 3 * longest  # a far one would only squeeze the bars
    shown_limit = budget if is_near else None
    whole = max(longest, shown_limit or 0.0) / _WIDEST
    limit = "" if shown_limit is None else f'<b class="limit" style="left:{shown_limit / whole * 100:.2f}%"></b>'
    rows = ""
    for phase in phases:
        bars = ""
        for css, peaks, nothing in (("predicted", predicted, "not_computed"), ("measured", measured, "not_measured")):
            value = peaks.get(phase, {}).get(field)
            if value is None:
                bars += f'<div class="bar {css}"><span class="muted">{escape(words(nothing))}</span></div>'
            else:
                bars += (
                    f'<div class="bar {css}"><i style="width:{value / whole * 100:.2f}%"></i>'
                    f"<span>{format_bytes(value)}</span></div>"
                )
        rows += f'<div class="phase">{escape(words.known(phase, "phase_"))}</div><div class="track">{bars}{limit}</div>'
    limit_key = f'<li><i class="swatch limit-key"></i>{escape(words("budget"))}</li>' if shown_limit is not None else ""
    return (
        f'<figure class="chart" aria-hidden="true"><figcaption><span class="chart-title">{escape(words(field))}</span>'
        f'<ul class="legend"><li><i class="swatch predicted"></i>{escape(words("predicted"))}</li>'
        f'<li><i class="swatch measured"></i>{escape(words("measured"))}</li>{limit_key}</ul></figcaption>'
        f'<div class="bars">{rows}</div></figure>'
    )


def _table(phases: list[str], fields: tuple[str, ...], predicted: Peaks, measured: Peaks, words: Words) -> str:
    titles = [words(key) for key in ("predicted", "measured", "difference")]
    head = f'<th scope="col">{escape(words("phase"))}</th>'
    if len(fields) > 1:
        head += f'<th scope="col" class="words">{escape(words("what"))}</th>'
    head += "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    rows = ""
    for phase in phases:
        for one in fields:
            guess, truth = predicted.get(phase, {}).get(one), measured.get(phase, {}).get(one)
            if guess is None and truth is None and len(fields) > 1:
                continue
            what = f'<td class="words">{escape(words(one))}</td>' if len(fields) > 1 else ""
            rows += (
                f'<tr><th scope="row">{escape(words.known(phase, "phase_"))}</th>{what}'
                f"<td>{_size(guess, words('not_computed'))}</td><td>{_size(truth, words('not_measured'))}</td>"
                f"<td>{_error(guess, truth)}</td></tr>"
            )
    table = f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _size(value: float | None, nothing: str) -> str:
    return f'<span class="muted">{escape(nothing)}</span>' if value is None else format_bytes(value)


def _error(predicted: float | None, measured: float | None) -> str:
    if predicted is None or not measured:
        return "–"
    return percent((predicted - measured) / measured)


def percent(share: float, digits: int = 1) -> str:
    """`+1.2 %`, with a true minus and a space that does not break."""
    return f"{share * 100:+.{digits}f}\N{NO-BREAK SPACE}%".replace("-", "\N{MINUS SIGN}")
