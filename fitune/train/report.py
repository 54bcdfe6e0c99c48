"""`report.html`: the whole run on one page that needs no network, no script and no fitune to be read."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import fitune
from fitune.errors import UserError
from fitune.files import atomic_write
from fitune.train.events import number
from fitune.train.link_sums import link_sums
from fitune.train.report_charts import Points, Series, line_chart, smooth
from fitune.train.report_memory import main_field, measured_peaks, memory_section, percent, predicted_peaks
from fitune.train.report_plan import listed, plan_section, techniques_section
from fitune.train.report_text import LANGUAGES, Words
from fitune.train.run_folder import RunFolder, RunInfo
from fitune.units import format_bytes, format_count, format_rate, format_share

_BADGES = {"done": "good", "running": "busy", "planned": "busy", "interrupted": "warn", "terminated": "warn"}
_LONGEST_AVERAGE = 100  # steps
_LANGUAGE_COLOURS = ("language", "language2", "language3")


def write_report(run: RunFolder, lang: str = "en") -> Path:
    """Writes `report.html` from what stands in the run's folder, at any moment of a run.

    Args:
        lang: `en` or `zh`. What the data says stays as it was recorded.

    Raises:
        UserError: another language, an unreadable plan or event log, or the page cannot be written.
    """
    if lang not in LANGUAGES:
        known = f"one of: {', '.join(LANGUAGES)}"
        raise UserError(f"cannot write the report in {lang!r}", "it is not a language of the report", known)
    page = _page(_View(run, run.info(), run.plan_values(), run.events(), Words(lang)))
    atomic_write(run.report_path, page.encode("utf-8", "replace"))
    return run.report_path


@dataclass(frozen=True)
class _View:
    """What the sections are made from."""

    run: RunFolder
    info: RunInfo
    plan: dict[str, Any]
    events: list[dict[str, Any]]
    words: Words

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("event") == kind]

    @cached_property
    def start(self) -> dict[str, Any]:
        """The newest start, or nothing."""
        return next(iter(reversed(self.of("start"))), {})

    @cached_property
    def steps(self) -> dict[int, dict[str, Any]]:
        return _by_step(self.of("step"))

    @cached_property
    def evals(self) -> dict[int, dict[str, Any]]:
        return _by_step(self.of("eval"))

    @cached_property
    def checkpoint(self) -> int | None:
        return max(_by_step(self.of("checkpoint")), default=None)

    @cached_property
    def eval_languages(self) -> list[str]:
        found: dict[str, None] = {}
        for event in self.evals.values():
            found |= dict.fromkeys(event.get("by_language") or {})
        return list(found) if len(found) > 1 else []

    def series(self, field: str) -> Points:
        """A field of the step events over the steps; None where it was not a number."""
        found = ((step, number(event.get(field))) for step, event in self.steps.items())
        return tuple((float(step), value) for step, value in found)

    def language(self, name: str) -> str:
        return self.words.known(name, "lang_") if self.words.known(name, "lang_") != name else name


def _by_step(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Events by their step, in order; of several with one step the last."""
    known = {int(step): event for event in events if (step := number(event.get("step"))) is not None}
    return dict(sorted(known.items()))


def _page(view: _View) -> str:
    words = view.words
    sections = [(key, title, body) for key, title, make in _SECTIONS if (body := make(view))]
    nav = "".join(f'<li><a href="#{key}">{escape(words(title))}</a></li>' for key, title, _ in sections)
    main = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(words(title))}</h2>'
        f"{body}</section>"
        for key, title, body in sections
    )
    made = words("made", version=fitune.__version__, time=_minute(datetime.now().astimezone()))
    model = escape(view.info.model or words("not_recorded"))
    return (
        f'<!DOCTYPE html>\n<html lang="{"zh-CN" if words.lang == "zh" else "en"}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">\n"
        f'<link rel="icon" href="data:,">\n<title>{model} – {escape(words("title"))} {escape(view.run.name)}</title>\n'
        f"<style>\n{_asset('report.css')}</style>\n</head>\n<body>\n"
        f'<header class="top">{_header(view)}{_tiles(view)}{_calls(view)}'
        f'<nav aria-label="{escape(words("contents"), quote=True)}"><ul>{nav}</ul></nav></header>\n'
        f"<main>\n{main}\n</main>\n<footer><p>{escape(made)}</p></footer>\n"
        f"<script>\n{_asset('report.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("fitune.train").joinpath(name).read_text(encoding="utf-8")


def _header(view: _View) -> str:
    info, words = view.info, view.words
    device = view.start.get("device_name") or view.plan.get("device_name")
    method = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}.get(info.method or "", info.method or "")
    adapter = view.plan.get("adapter")
    rank = f"r {adapter.get('r')}" if isinstance(adapter, dict) else ""
    facts = [f"{method} {rank}".strip(), str(view.plan.get("base_format") or ""), str(device or "")]
    badge = f'<span class="badge {_BADGES.get(info.status, "bad")}">{escape(words.known(info.status))}</span>'
    name = f'<span class="name">{escape(view.run.name)}</span>'
    return (
        f'<div class="kicker"><span>{escape(words("title"))}</span>{name}</div>'
        f"<h1>{escape(info.model or words('not_recorded'))}</h1>"
        f'<div class="kicker">{badge}'
        f"<span>{escape(' · '.join(fact for fact in facts if fact))}</span></div>"
    )


def _tiles(view: _View) -> str:
    info, words = view.info, view.words
    tiles = [_loss_tile(view)]
    total = words("of_total", total=info.steps_total) if info.steps_total else ""
    tiles.append(_tile(words("steps"), str(info.steps_done), total))
    speeds = [y for _, y in view.series("tokens_per_s") if y is not None]
    if speeds:
        speed = f'{statistics.median(speeds):,.0f} <span class="small-unit">{escape(words("tokens_per_s"))}</span>'
        tiles.append(_tile(words("speed"), speed, escape(words("median"))))
    predicted, measured = predicted_peaks(view.plan), measured_peaks(view.events)
    field = main_field(predicted, measured)
    peaks = [y for phase in measured.values() if (y := phase.get(field or "")) is not None]
    if peaks and field:
        budget = number(view.plan.get("budget_bytes"))
        under = words(field)
        if budget is not None and field != "host_bytes":
            under = words("of_budget", budget=_joined(format_bytes(budget)))
        tiles.append(_tile(words("peak_memory"), format_bytes(max(peaks)), escape(under)))
    if info.duration_s is not None:
        when = _minute(datetime.fromisoformat(info.started)) if info.started else ""
        started = escape(words("started", time="\0")).replace("\0", f'<span class="nowrap">{when}</span>')
        tiles.append(_tile(words("time"), words.duration(info.duration_s), started))
    trainable, total_weights = number(view.start.get("trainable")), number(view.start.get("total"))
    if trainable is not None and total_weights:
        share = words("share_of", share=_share(trainable / total_weights), total=_joined(format_count(total_weights)))
        tiles.append(_tile(words("trained_weights"), format_count(trainable), share))
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _loss_tile(view: _View) -> str:
    info, words = view.info, view.words
    before, after = info.eval_loss_before, info.eval_loss_after
    if after is None:
        if info.last_loss is None:
            return _tile(words("train_loss"), "–", escape(words("not_recorded")), css="hero")
        return _tile(words("train_loss"), f"{info.last_loss:.3f}", escape(words("last_step")), css="hero")
    if before is None:
        return _tile(words("held_out_loss"), f"{after:.3f}", "", css="hero")
    text = f'{before:.3f}<span class="arrow"> → </span>{after:.3f}'
    return _tile(words("held_out_loss"), text, _change(before, after), css="hero")


def _tile(name: str, value_html: str, under_html: str, css: str = "") -> str:
    return f'<div class="{css}"><dt>{escape(name)}</dt><dd>{value_html}</dd><dd class="under">{under_html}</dd></div>'


def _calls(view: _View) -> str:
    """What the reader must not miss: why the run stopped, losses that were no numbers, notices."""
    info, words, calls = view.info, view.words, []
    if info.status != "done":
        now = _minute(datetime.now().astimezone())
        text = words(f"{info.status}_text", step=info.steps_done, time=now)
        if info.status not in ("planned", "running"):
            known = view.checkpoint
            text += " " + (words("no_checkpoint") if known is None else words("last_checkpoint", step=known))
        error = view.of("end")[-1].get("error") if info.status == "failed" else None
        body = f"<p>{escape(text)}</p>" + (f"<pre>{escape(str(error))}</pre>" if error else "")
        calls.append((_BADGES.get(info.status, "bad"), body))
    if info.recovered:
        calls.append(("good", f"<p>{escape(words('recovered', story=info.recovered))}</p>"))
    broken = [step for step, event in view.steps.items() if number(event.get("loss")) is None]
    if broken:
        text = words("not_finite", count=len(broken), total=len(view.steps), step=broken[0])
        calls.append(("warn", f"<p>{escape(text)}</p>"))
    notices = list(dict.fromkeys(str(event.get("text")) for event in view.of("notice")))
    if notices:
        calls.append(("busy", "".join(f"<p>{escape(text)}</p>" for text in notices)))
    return "".join(f'<div class="call {css}" role="note">{body}</div>' for css, body in calls)


def _loss(view: _View) -> str:
    words, points = view.words, view.series("loss")
    if not points and not view.evals:
        return _muted(words("no_steps"))
    series = _with_average(points, "train", words, "train_each", "train_smooth")
    evals = tuple((float(step), number(event.get("eval_loss"))) for step, event in view.evals.items())
    series.append(Series(words("eval_all"), "eval", evals, dots=True))
    for css, language in zip(_LANGUAGE_COLOURS, view.eval_languages, strict=False):
        losses = tuple((float(s), number((e.get("by_language") or {}).get(language))) for s, e in view.evals.items())
        series.append(Series(words("eval_language", language=view.language(language)), css, losses, True, dots=True))
    chart = line_chart("loss-chart", words("loss_chart"), series, words, _significant)
    return chart + (_eval_table(view) if view.evals else f'<p class="note">{escape(words("no_eval"))}</p>')


def _eval_table(view: _View) -> str:
    """Held-out loss before and after, of all records and per language."""
    words = view.words
    before = view.evals.get(0, {})
    after = next((event for step, event in reversed(view.evals.items()) if step > 0), {})
    rows = ""
    for name, language in [(words("all"), None), *((view.language(x), x) for x in view.eval_languages)]:
        pair = [
            number(event.get("eval_loss") if language is None else (event.get("by_language") or {}).get(language))
            for event in (before, after)
        ]
        cells = "".join(f"<td>{'–' if value is None else f'{value:.3f}'}</td>" for value in pair)
        change = "–" if pair[0] is None or pair[1] is None else _change(pair[0], pair[1])
        rows += f'<tr><th scope="row">{escape(name)}</th>{cells}<td>{change}</td></tr>'
    head = "".join(f'<th scope="col">{escape(words(key))}</th>' for key in ("records", "before", "after", "change"))
    return (
        f"<h3>{escape(words('held_out_loss'))}</h3><div class='scroll'><table class='numbers'>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _samples(view: _View) -> str:
    words = view.words
    answers: dict[tuple[str, str], dict[str, str]] = {}
    for event in view.of("sample"):
        key = (str(event.get("language") or ""), str(event.get("prompt")))
        answers.setdefault(key, {})[str(event.get("when"))] = str(event.get("answer"))
    if not answers:
        return ""
    body = f"<p>{escape(words('samples_text'))}</p>"
    for (language, prompt), texts in answers.items():
        lang = f' lang="{escape(language, quote=True)}"' if language else ""
        cards = ""
        for when in ("before", "after"):
            text = f"<p{lang}>{escape(texts[when])}</p>" if when in texts else _muted(words("not_recorded"))
            cards += f'<div class="{when}"><h3>{escape(words(when))}</h3>{text}</div>'
        label = f"<small>{escape(view.language(language))}</small>" if language else ""
        ask = f'<p class="ask"{lang}>{label}{escape(prompt)}</p>'
        body += f'<div class="sample">{ask}<div class="answers">{cards}</div></div>'
    return body


def _next(view: _View) -> str:
    run, status = view.run, view.info.status
    commands = []
    if status not in ("done", "running"):
        commands.append(("do_start" if status == "planned" else "do_resume", f"fitune train --resume {run.argument}"))
    if run.adapter_path.is_dir() or run.model_path.is_dir() or status == "done":
        commands += [("do_chat", f"fitune chat {run.argument}"), ("do_export", f"fitune export {run.argument}")]
    model = view.info.model or ""
    if run.adapter_path.is_dir() and "/" in model and ":" not in model:  # a name that transformers knows as well
        commands.append((
            "do_python",
            "from transformers import AutoModelForCausalLM\nfrom peft import PeftModel\n\n"
            f"base = AutoModelForCausalLM.from_pretrained({model!r})\n"
            f"model = PeftModel.from_pretrained(base, {str(run.adapter_path)!r})",
        ))  # fmt: skip
    return "".join(f'<h3>{view.words(key)}</h3><pre class="command">{escape(text)}</pre>' for key, text in commands)


def _memory(view: _View) -> str:
    return memory_section(view.plan, view.events, view.words)


def _plan(view: _View) -> str:
    return plan_section(view.plan, view.words)


def _techniques(view: _View) -> str:
    return techniques_section(view.of("techniques"), view.words)


def _speed(view: _View) -> str:
    words = view.words
    predicted = view.plan.get("predicted")
    predicted = predicted if isinstance(predicted, dict) else {}
    rows = ""
    for key, field, show in (
        ("speed_chart", "tokens_per_s", lambda y: f"{y:,.0f}"),
        ("step_time", "step_s", words.duration),
    ):
        known = [y for _, y in view.series(field) if y is not None]
        if not known:
            continue
        guess = number(predicted.get(field))
        told = f'<span class="muted">{escape(words("not_computed"))}</span>' if guess is None else show(guess)
        middle = show(statistics.median(known))
        rows += f'<tr><th scope="row">{escape(words(key))}</th><td>{told}</td><td>{middle}</td></tr>'
    if not rows:
        return ""
    names = ["", words("predicted"), words("measured_median")]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    speed = _with_average(view.series("tokens_per_s"), "train", words)
    rate = [Series(words("lr_chart"), "language", view.series("lr"))]
    norm = _with_average(view.series("grad_norm"), "language2", words)
    charts = line_chart("speed-chart", words("speed_chart"), speed, words, _grouped, small=True)
    charts += line_chart("lr-chart", words("lr_chart"), rate, words, _rate, small=True)
    charts += line_chart("grad-chart", words("grad_chart"), norm, words, _significant, small=True)
    table = f"<table class='numbers'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll">{table}</div><div class="pair">{charts}</div>{_link(view)}'


def _link(view: _View) -> str:
    """What was streamed, how fast, and the waiting; nothing where all weights stayed on the device."""
    words, sums = view.words, link_sums(view.steps.values())
    if sums is None or sums.bytes_per_s is None:
        return ""
    a_step = statistics.median(y for _, y in view.series("link_bytes") if y is not None)
    text = words("link_text", step=format_bytes(a_step), total=format_bytes(sums.num_bytes),
                 rate=format_rate(sums.bytes_per_s), share=format_share(sums.wait_share))  # fmt: skip
    if (number(view.plan.get("world_size")) or 1) > 1:
        text += " " + words("link_first")
    waits = _with_average(view.series("link_wait_share"), "eval", words)
    rates = _with_average(view.series("link_bytes_per_s"), "train", words)
    charts = line_chart("wait-chart", words("wait_chart"), waits, words, format_share, small=True)
    charts += line_chart("rate-chart", words("rate_chart"), rates, words, format_rate, small=True)
    return f'<h3>{escape(words("link_title"))}</h3><p>{escape(text)}</p><div class="pair">{charts}</div>'


def _data(view: _View) -> str:
    words, events = view.words, view.of("data")
    if not events:
        return ""
    data, facts = events[-1], []
    for key in ("layout", "template"):
        if data.get(key) is not None:
            facts.append((words(key), listed(data[key])))
    lengths = data.get("lengths")
    if isinstance(lengths, dict):
        facts.append((words("lengths"), " · ".join(f"{words.known(k)} {listed(v)}" for k, v in lengths.items())))
    dropped = data.get("dropped")
    if isinstance(dropped, dict):
        facts.append((words("dropped"), " · ".join(f"{k}: {v}" for k, v in dropped.items()) or words("none")))
    if data.get("truncated") is not None:
        facts.append((words("truncated"), str(data["truncated"])))
    return _facts(facts)


def _recipe(view: _View) -> str:
    again = f"fitune train {view.run.argument}/{view.run.current_recipe_path.name} --out runs/again"
    text = escape(view.words("recipe_text", command="\0")).replace("\0", f"<code>{escape(again)}</code>")
    return f"<pre>{escape(view.run.recipe_text())}</pre><p class='note'>{text}</p>"


def _versions(view: _View) -> str:
    words, start = view.words, view.start
    facts = [(key.removesuffix("_version"), str(start[key])) for key in start if key.endswith("_version")]
    facts.append((words("device"), str(start.get("device_name") or view.plan.get("device_name"))))
    resumed = [str(event["resumed_from"]) for event in view.of("start") if event.get("resumed_from") is not None]
    if resumed:
        facts.append((words("resumed_from"), ", ".join(resumed)))
    facts += [(words("run_folder"), str(view.run.path)), (words("size"), format_bytes(view.info.size_bytes))]
    return _facts(facts)


def _facts(facts: list[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f'<dl class="facts">{items}</dl>'


def _with_average(
    points: Points, css: str, words: Words, each: str = "each_step", averaged: str = "averaged"
) -> list[Series]:  # fmt: skip
    """The points, and over them their average when there are enough to need one."""
    span = min(len(points) // 15, _LONGEST_AVERAGE)
    if span <= 1:
        return [Series(words(each), css, points)]
    line = Series(words(averaged, span=span), css, smooth(points, span))
    return [Series(words(each), css, points, minor=True), line]


def _change(before: float, after: float) -> str:
    return percent((after - before) / before) if before else "–"


def _significant(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def _rate(value: float) -> str:
    """A learning rate as recipes write it: 2e-4."""
    if value == 0 or value >= 0.01:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _share(share: float) -> str:
    return f"{share * 100:.2g}\N{NO-BREAK SPACE}%"


def _joined(text: str) -> str:
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _muted(text: str) -> str:
    return f'<p class="muted">{escape(text)}</p>'


def _grouped(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _minute(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")


# (id in the page, title, maker); a maker that returns nothing leaves its section out.
_SECTIONS: tuple[tuple[str, str, Callable[[_View], str]], ...] = (
    ("loss", "loss", _loss),
    ("samples", "samples", _samples),
    ("next", "next", _next),
    ("memory", "memory", _memory),
    ("plan", "plan", _plan),
    ("techniques", "techniques", _techniques),
    ("speed", "speed_title", _speed),
    ("data", "data", _data),
    ("recipe", "recipe", _recipe),
    ("versions", "versions", _versions),
)
