"""The report's sections on the plan: what was decided and why, and what each technique saves and costs in this job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fitune.planner.sentences import translated
from fitune.planner.techniques_list import BY_KEY
from fitune.train.events import number
from fitune.train.report_text import Words
from fitune.units import MIB, format_bytes

_MARKS = {"exact": ("good", "="), "approximate": ("warn", "≈"), "other": ("warn", "≠")}


def plan_section(plan: Mapping[str, Any], words: Words) -> str:
    """Every decision with its reason; below them all fields of the plan."""
    rows = ""
    for reason in plan.get("reasons") or []:
        value, why = (translated(str(reason.get(key, "")), words.lang) for key in ("value", "why"))
        rows += (
            f'<tr><th scope="row">{escape(_decision(str(reason.get("decision")), words))}</th>'
            f"<td>{escape(value)}</td>"
            f"<td>{_mark('exact' if reason.get('exact', True) else 'approximate', words)}</td>"
            f"<td{_lang_of(why, words)}>{escape(why)}</td></tr>"
        )
    table = _table(("decision", "value", "exactness", "why"), rows, words)
    body = f"<p>{escape(words('plan_text'))}</p>{table}" if rows else f"<p>{escape(words('no_reasons'))}</p>"
    fields = ""
    for name, value in plan.items():
        if name not in ("reasons", "predicted"):
            fields += f"<dt>{escape(words.decision(name))}</dt><dd>{_field(name, value, words)}</dd>"
    return f"{body}<details><summary>{escape(words('whole_plan'))}</summary><dl class='facts'>{fields}</dl></details>"


def techniques_section(events: Sequence[Mapping[str, Any]], words: Words) -> str:
    """The techniques that the plan uses, by what they save: nothing where the run did not record them.

    Args:
        events: those of the kind `techniques`.
    """
    used = events[-1].get("used") if events else None
    rows = ""
    for effect in used or []:
        technique = BY_KEY.get(str(effect.get("technique")))
        if technique is None:  # of another version
            continue
        name = escape(technique.text("name", words.lang))
        how, costs = technique.text("how", words.lang), technique.text("costs", words.lang)
        rows += (
            f'<tr><th scope="row">{name}</th><td class="nowrap">{escape(_size(effect, words))}</td>'
            f"<td>{_mark(technique.exact, words)}</td><td>{escape(how)}</td><td>{escape(costs)}</td></tr>"
        )
    if not rows:
        return ""
    table = _table(("technique", "saves_here", "exactness", "how_it_works", "costs"), rows, words)
    return f"<p>{escape(words('techniques_text'))}</p>{table}"


def _size(effect: Mapping[str, Any], words: Words) -> str:
    """`4.20 GiB`, `~1.10 GiB` by formula, or that it saves no memory."""
    saved = number(effect.get("saves_bytes"))
    if saved is None or abs(saved) < MIB:
        return words("saves_none")
    return ("~" if effect.get("basis") == "formula" else "") + format_bytes(saved)


def _decision(name: str, words: Words) -> str:
    """The planner's own word for a decision, else the report's for a field."""
    own = translated(name, words.lang)
    return own if own != name else words.decision(name)


def _mark(kind: str, words: Words) -> str:
    css, sign = _MARKS[kind]
    return f'<span class="mark {css}">{sign} {escape(words(kind))}</span>'


def _lang_of(text: str, words: Words) -> str:
    """A sentence without a translation is English within a page of another language."""
    return ' lang="en"' if words.lang != "en" and text.isascii() and text else ""


def _table(heads: Sequence[str], rows: str, words: Words) -> str:
    head = "".join(f'<th scope="col">{escape(words(key))}</th>' for key in heads)
    return f'<table class="stack"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _field(name: str, value: Any, words: Words) -> str:
    if value is None:
        return f'<span class="muted">{escape(words("none"))}</span>'
    if name.endswith("_bytes") and (size := number(value)) is not None:
        return format_bytes(size)
    if isinstance(value, dict):
        return escape(listed(value))
    if value and isinstance(value, list) and isinstance(value[0], dict):
        return "<br>".join(escape(listed(inner)) for inner in value)
    return escape(listed(value))


def listed(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key} {listed(inner)}" for key, inner in value.items())
    return ", ".join(map(listed, value)) if isinstance(value, list) else str(value)
