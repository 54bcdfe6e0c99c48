"""Charts as HTML that needs no script: an SVG that stretches to any width under labels that keep their size.

The drawing has a viewBox of 1000 x 1000 without a fixed aspect; strokes do not scale. Axis labels are HTML placed in
per cent. The script of the report adds a cursor from the JSON that follows each chart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from fitune.train.report_text import Words

_MAX_DRAWN = 600  # points of a line; more would not be seen
_MAX_ROWS = 24  # rows of the table under a chart

Point = tuple[float, float | None]
Points = tuple[Point, ...]


@dataclass(frozen=True)
class Series:
    """A line or a row of dots. `None` is a gap. `css` gives the colour: `train`, `eval`, `language`, `language2` …

    `minor` draws a line faint, dots smaller and their connection dashed.
    """

    name: str
    css: str
    points: Points
    minor: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Scale:
    """Maps values to 0 … 1 and knows where the round values lie."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def line_chart(
    key: str, title: str, series: Sequence[Series], words: Words, show: Callable[[float], str], small: bool = False
) -> str:
    """A chart over steps with legend, cursor and a table of its values; empty text when there is nothing to draw.

    Args:
        key: the id of the chart in the page.
        show: a value as text, with its unit.
    """
    series = [one for one in series if any(y is not None for _, y in one.points)]
    if not series:
        return ""
    x_scale = _x_scale([x for one in series for x, _ in one.points])
    y_scale = _y_scale([y for one in series for _, y in one.points if y is not None])
    rows = _rows(series)
    drawn = "".join(_draw(one, x_scale, y_scale) for one in series)
    grid = "".join(f'<path class="grid" d="M0 {_up(y_scale.at(tick))}H1000"/>' for tick in y_scale.ticks)
    y_labels = "".join(
        f'<span style="bottom:{y_scale.at(tick) * 100:.2f}%">{escape(show(tick))}</span>' for tick in y_scale.ticks
    )
    x_labels = "".join(f'<span style="left:{x_scale.at(tick) * 100:.2f}%">{tick:.0f}</span>' for tick in x_scale.ticks)
    keys = "".join(f'<li><i class="key {one.css}{_form(one)}"></i>{escape(one.name)}</li>' for one in series)
    legend = f'<ul class="legend">{keys}</ul>' if len(series) > 1 else ""
    label = escape(_summary(title, series, show, words), quote=True)
    return (
        f'<figure class="chart{" small" if small else ""}" id="{key}"><figcaption>'
        f'<span class="chart-title">{escape(title)}</span>{legend}</figcaption>'
        f'<div class="plot-box"><div class="y-axis" aria-hidden="true">{y_labels}</div>'
        f'<div class="plot" role="img" tabindex="0" aria-label="{label}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{grid}{drawn}</svg></div>'
        f'<div class="x-axis" aria-hidden="true">{x_labels}<b>{escape(words("step"))}</b></div></div>'
        f"{_table(rows, series, words, show)}"
        f'<script type="application/json" class="cursor-data">{_cursor(rows, series, x_scale, y_scale, words, show)}'
        "</script></figure>"
    )


def smooth(points: Sequence[Point], span: int) -> Points:
    """Exponential average over about `span` points, unbiased at the start; gaps stay gaps and count for nothing."""
    keep, total, weight = 1 - 2 / (span + 1), 0.0, 0.0
    result: list[Point] = []
    for x, y in points:
        if y is not None:
            total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        result.append((x, None if y is None else total / weight))
    return tuple(result)


def nice_ticks(low: float, high: float, count: int) -> tuple[float, ...]:
    """Round values (1, 2 or 5 times a power of ten apart) from at most `low` to at least `high`."""
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return tuple(round(i * gap, 12) for i in range(first, last + 1))


def _x_scale(values: Sequence[float]) -> Scale:
    low, high = min(values), max(values)
    if low == high:
        return Scale(low - 1, high + 1, (low,))
    ticks = nice_ticks(low, high, 6)
    return Scale(low, high, tuple(t for t in ticks if low <= t <= high and t == int(t)))


def _y_scale(values: Sequence[float]) -> Scale:
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(abs(high), 1e-30):
        margin = abs(high) * 0.1 or 1.0
        low, high = low - margin, high + margin
    ticks = nice_ticks(low, high, 5)
    return Scale(ticks[0], ticks[-1], ticks)


def _draw(series: Series, x_scale: Scale, y_scale: Scale) -> str:
    """Dots are strokes of no length with round ends: they stay round however the drawing is stretched."""
    known = [(x, y) for x, y in series.points if y is not None]
    if series.dots or len(known) <= 2:
        line = _path(known, x_scale, y_scale)
        dots = "".join(f"M{x_scale.at(x) * 1000:.1f} {_up(y_scale.at(y))}h0" for x, y in known)
        css = f"{series.css} dashed" if series.minor else series.css
        return f'<path class="line thin {css}" d="{line}"/><path class="dots {css}" d="{dots}"/>'
    css = "faint" if series.minor else "line"
    return f'<path class="{css} {series.css}" d="{_path(_thin(series.points), x_scale, y_scale)}"/>'


def _path(points: Sequence[Point], x_scale: Scale, y_scale: Scale) -> str:
    parts, is_drawing = [], False
    for x, y in points:
        if y is not None:
            place = f"{x_scale.at(x) * 1000:.1f} {_up(y_scale.at(y))}"
            parts.append(f"L{place}" if is_drawing else f"M{place}h0")  # h0: a lone point is a dot
        is_drawing = y is not None
    return "".join(parts)


def _up(share: float) -> str:
    return f"{1000 - share * 1000:.1f}"


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    """At most about `_MAX_DRAWN` points: of each bucket the lowest, the highest and a gap, so that no spike is lost."""
    if len(points) <= _MAX_DRAWN:
        return points
    size = math.ceil(len(points) / (_MAX_DRAWN // 2))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        known = [(y, i) for i, (_, y) in enumerate(bucket) if y is not None]
        chosen = {min(known)[1], max(known)[1]} if known else set()
        chosen |= {i for i, (_, y) in enumerate(bucket) if y is None and (i == 0 or bucket[i - 1][1] is not None)}
        kept += [bucket[i] for i in sorted(chosen)]
    return kept


def _rows(series: Sequence[Series]) -> list[tuple[float, list[float | None]]]:
    """All values by step, of a long line only every so many, of dots every one."""
    xs: set[float] = set()
    for one in series:
        stride = 1 if one.dots else math.ceil(len(one.points) / _MAX_DRAWN)
        xs |= {x for x, _ in one.points[::stride]} | {x for x, _ in one.points[-1:]}
    values = [dict(one.points) for one in series]
    return [(x, [known.get(x) for known in values]) for x in sorted(xs)]


def _table(
    rows: list[tuple[float, list[float | None]]], series: Sequence[Series], words: Words, show: Callable[[float], str]
) -> str:
    stride = math.ceil(len(rows) / _MAX_ROWS)
    dotted = [i for i, one in enumerate(series) if one.dots]
    chosen = [
        row for i, row in enumerate(rows)
        if i % stride == 0 or i == len(rows) - 1 or any(row[1][k] is not None for k in dotted)
    ]  # fmt: skip
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in [words("step"), *(one.name for one in series)])
    body = ""
    for x, ys in chosen:
        cells = "".join(f"<td>{'–' if y is None else escape(show(y))}</td>" for y in ys)
        body += f'<tr><th scope="row">{x:.0f}</th>{cells}</tr>'
    note = f'<p class="note">{escape(words("table_thinned", stride=stride))}</p>' if stride > 1 else ""
    return (
        f"<details><summary>{escape(words('table'))}</summary><div class='scroll'><table class='numbers'>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}</details>"
    )


def _cursor(
    rows: list[tuple[float, list[float | None]]],
    series: Sequence[Series],
    x_scale: Scale,
    y_scale: Scale,
    words: Words,
    show: Callable[[float], str],
) -> str:
    """What the cursor shows at each step: `[[x share, title, [[colour, name, text, y share] …]] …]`."""
    data = []
    for x, ys in rows:
        known = [(one, y) for one, y in zip(series, ys, strict=True) if y is not None]
        shown = [[one.css, one.name, show(y), round(y_scale.at(y), 4)] for one, y in known]
        data.append([round(x_scale.at(x), 4), f"{words('step')} {x:.0f}", shown])
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _form(series: Series) -> str:
    if series.dots:
        return " dot dashed" if series.minor else " dot"
    return " pale" if series.minor else ""


def _summary(title: str, series: Sequence[Series], show: Callable[[float], str], words: Words) -> str:
    """What a screen reader says in place of the drawing."""
    parts = []
    for one in series:
        known = [(x, y) for x, y in one.points if y is not None]
        (first_x, first), (last_x, last) = known[0], known[-1]
        begin, end = f"{words('step')} {first_x:.0f}", f"{words('step')} {last_x:.0f}"
        parts.append(f"{one.name}: {show(first)} ({begin}) → {show(last)} ({end})")
    return f"{title}. {'; '.join(parts)}"
