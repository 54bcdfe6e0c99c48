"""A prediction as a picture: each phase as a stacked bar against the budget, and one step as a stacked area.

The picture is a list of shapes, written as SVG by hand or drawn as PNG with pillow (`pip install 'fitune[charts]'`).
Text in a PNG is English whatever the language: pillow's own font has no Chinese.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fitune.cli.chart_shapes import Canvas, write_png, write_svg
from fitune.cli.render_memory import is_far_off, part_runs, phase_owners
from fitune.cli.render_predict import peak_lines, step_base, verdict
from fitune.cli.words import Words
from fitune.cli.words_predict import PREDICT
from fitune.errors import UserError
from fitune.memory.groups import GROUPS, group_of, grouped, legend
from fitune.units import format_bytes

WIDTH = 1000
MARGIN = 24
LABEL_WIDTH = 110
BAR_HEIGHT, BAR_GAP = 22, 8
AREA_HEIGHT = 240
INK, MUTED, LIMIT = "#1c1e21", "#6a7078", "#c02f1d"
SUFFIXES = (".svg", ".png")


def check_path(path: Path) -> None:
    """Raises UserError when a chart cannot be written there: another suffix, no folder, or PNG without pillow."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"cannot write a chart to {path}", f"{path.suffix or 'a name without a suffix'} is no format "
                        "of charts", "name a file that ends in .svg or .png")  # fmt: skip
    if not path.absolute().parent.is_dir():
        raise UserError(f"cannot write a chart to {path}", f"the folder {path.parent} does not exist",
                        "make the folder first, or name another place")  # fmt: skip
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"cannot write a chart to {path}", "its permissions do not allow it",
                        "name another place")  # fmt: skip
    if path.suffix.lower() == ".png":
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise UserError("cannot draw a PNG", "pillow is not installed",
                            "pip install 'fitune[charts]', or name a file that ends in .svg") from None  # fmt: skip


def write_chart(result: Mapping[str, Any], path: Path, lang: str = "en") -> None:
    """Write what `fitune predict --json` holds as a picture; the suffix says which kind.

    Raises:
        UserError: see `check_path`; or the file cannot be written.
    """
    check_path(path)
    is_svg = path.suffix.lower() == ".svg"
    canvas = draw(result, Words(lang if is_svg else "en", PREDICT))
    try:
        if is_svg:
            write_svg(canvas, path)
        else:
            write_png(canvas, path)
    except OSError as error:
        raise UserError(f"cannot write {path}", str(error.strerror or error), "check the path and its permissions"
                        ) from None  # fmt: skip


def draw(result: Mapping[str, Any], words: Words) -> Canvas:
    """The picture of a prediction."""
    canvas = Canvas(WIDTH, 0)
    y = 16.0
    for index, line in enumerate(verdict(result, words)):
        size = 18 if index == 0 else 13
        canvas.text(MARGIN, y + size, line, size, INK if index < 2 else MUTED, bold=index == 0)
        y += size + 8
    rows = phase_owners(result)
    if rows:
        y = _bars(canvas, y + 18, rows, result, words)
    if result.get("timeline"):
        y = _area(canvas, y + 26, result, words)
    canvas.height = y + 16
    return canvas


def _bars(canvas: Canvas, y: float, rows: Sequence[tuple[str, dict[str, int]]], result: Mapping[str, Any],
          words: Words) -> float:  # fmt: skip
    """Bars with the budget as a line through them, then the key. Returns where the next part may start."""
    plan, budget = result["plan"], result["plan"].get("budget_bytes")
    canvas.text(MARGIN, y, words("phases"), 14, INK, bold=True)
    y += 14
    most = max(sum(owners.values()) for _, owners in rows)
    is_far = is_far_off(budget, most)
    full = max(most, 0 if is_far else budget or 0)
    left, room = MARGIN + LABEL_WIDTH, WIDTH - 2 * MARGIN - LABEL_WIDTH - 90
    top = y
    for name, owners in rows:
        canvas.text(MARGIN, y + BAR_HEIGHT - 6, words(name), 13, INK)
        x = float(left)
        for key, size in grouped(owners).items():
            width = size / full * room
            canvas.box(x, y, width, BAR_HEIGHT, group_of(key).fill)
            x += width
        canvas.text(left + room + 12, y + BAR_HEIGHT - 6, format_bytes(sum(owners.values())), 12, INK)
        y += BAR_HEIGHT + BAR_GAP
    if is_far:
        canvas.text(left, y + 10, words("budget_far", budget=format_bytes(budget)), 12, LIMIT)
        y += 14
    elif budget:
        x = left + budget / full * room
        canvas.line(x, top - 4, x, y, LIMIT)
        label = f"{words('budget')} {format_bytes(budget)}"
        canvas.text(min(x + 4, WIDTH - MARGIN - canvas.text_width(label, 12)), y + 10, label, 12, LIMIT)
        y += 14
    return _key(canvas, y + 16, {key for _, owners in rows for key in grouped(owners)}, plan, words)


def _key(canvas: Canvas, y: float, keys: set[str], plan: Mapping[str, Any], words: Words) -> float:
    x = float(MARGIN)
    for group, name in legend(keys, plan, words.lang):
        width = 24 + canvas.text_width(name, 12)
        if x + width > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 20
        canvas.box(x, y - 10, 12, 12, group.fill)
        canvas.text(x + 17, y, name, 12, INK)
        x += width + 14
    return y + 8


def _area(canvas: Canvas, y: float, result: Mapping[str, Any], words: Words) -> float:
    """The step from left to right, what lives from bottom to top, parts named below, largest blocks at the end."""
    timeline, base = result["timeline"], step_base(result)
    stacks = [grouped(_sum(base, moment["owners"])) for moment in timeline]
    most = max(sum(stack.values()) for stack in stacks)
    budget = result["plan"].get("budget_bytes")
    near = budget is not None and not is_far_off(budget, most)
    full = max(most, budget if near else 0)
    left, room = MARGIN + LABEL_WIDTH, WIDTH - 2 * MARGIN - LABEL_WIDTH
    canvas.text(MARGIN, y, words("timeline"), 14, INK, bold=True)
    top, bottom = y + 16, y + 16 + AREA_HEIGHT
    step = room / len(stacks)
    height_of: Callable[[float], float] = lambda size: size / full * AREA_HEIGHT  # noqa: E731
    floor = [0.0] * len(stacks)
    for group in GROUPS:
        ceiling = [low + stack.get(group.key, 0) for low, stack in zip(floor, stacks, strict=True)]
        if ceiling != floor:
            outline = _outline(left, bottom, step, [height_of(c) for c in ceiling], [height_of(f) for f in floor])
            canvas.polygon(outline, group.fill)
        floor = ceiling
    for share in (0.0, 0.5, 1.0):
        canvas.text(MARGIN, bottom - share * AREA_HEIGHT + 4, format_bytes(int(share * full)), 12, MUTED)
        canvas.line(left - 6, bottom - share * AREA_HEIGHT, left, bottom - share * AREA_HEIGHT, MUTED)
    if near and budget is not None:
        canvas.line(left, bottom - height_of(budget), left + room, bottom - height_of(budget), LIMIT)
        canvas.text(left + 4, max(bottom - height_of(budget) - 4, top), words("budget"), 12, LIMIT)
    _parts(canvas, left, bottom + 16, step, [moment["part"] for moment in timeline], words)
    y = bottom + 26
    for line in peak_lines(result, words):
        y += 17
        canvas.text(left, y, line, 12, INK)
    return y


def _sum(base: Mapping[str, int], owners: Mapping[str, int]) -> dict[str, int]:
    return {name: base.get(name, 0) + owners.get(name, 0) for name in {**base, **owners}}


def _outline(left: float, bottom: float, step: float, tops: Sequence[float], lows: Sequence[float]
             ) -> list[tuple[float, float]]:  # fmt: skip
    """A stair from left to right along the tops, and back along the lows."""
    there = [(left + (i + side) * step, bottom - top) for i, top in enumerate(tops) for side in (0, 1)]
    back = [(left + (i + side) * step, bottom - low) for i, low in enumerate(lows) for side in (0, 1)]
    return there + back[::-1]


def _parts(canvas: Canvas, left: float, y: float, step: float, parts: Sequence[str], words: Words) -> None:
    """The parts' names in the middle of theirs, where there is room for them, and a mark where each begins."""
    free_from = 0.0
    for key, start, end in part_runs(parts):
        width = canvas.text_width(words(key), 12)
        x = max(left, min(left + (start + end) / 2 * step - width / 2, left + len(parts) * step - width))
        canvas.line(left + start * step, y - 14, left + start * step, y - 9, MUTED)
        if x >= free_from:
            canvas.text(x, y, words(key), 12, MUTED)
            free_from = x + width + 6
