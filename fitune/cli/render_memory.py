"""Memory on the terminal: a stacked bar per phase against the budget, and one step as an area of letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fitune.cli.words import Words
from fitune.memory.groups import GROUPS, cells, grouped, legend
from fitune.units import format_bytes

if TYPE_CHECKING:
    from rich.text import Text

BUDGET_MARK = "|"
MOST_WIDTH = 100  # wider lines do not read better
NAME_WIDTH = 12
SIZE_WIDTH = 11
AREA_HEIGHT = 9
FAR = 2.0  # a budget of more than this many times the highest bar is not drawn
PARTS = {
    "start": "embed", "embed": "embed", "stash": "forward", "forward": "forward", "tail": "tail",
    "backward": "backward", "optimizer": "update",
}  # fmt: skip

Owners = Mapping[str, int]


def phase_owners(result: Mapping[str, Any]) -> list[tuple[str, dict[str, int]]]:
    """(phase, owner to bytes) of the phases whose bytes are known: of the card's, else of RAM's."""
    phases = (result.get("predicted") or {}).get("phases") or {}
    on_card = (result.get("plan") or {}).get("device") != "cpu"
    rows = []
    for name, fields in phases.items():
        owners = (fields or {}).get("device" if on_card else "host")
        if owners:
            rows.append((name, dict(owners)))
    return rows


def phase_bars(rows: Sequence[tuple[str, Owners]], budget_bytes: int | None, width: int, words: Words) -> list[Text]:
    """A line per phase: its name, its bytes, its bar; `|` stands at the budget, or a line below says that it is far.

    Args:
        width: columns of a line.
    """
    sizes = [sum(owners.values()) for _, owners in rows]
    is_far = is_far_off(budget_bytes, max(sizes))
    full = max([*sizes, 0 if is_far else budget_bytes or 0])
    room = max(width - NAME_WIDTH - SIZE_WIDTH - 3, 10)
    mark = None if not budget_bytes or is_far else min(round(budget_bytes / full * room), room - 1)
    lines = []
    for (name, owners), size in zip(rows, sizes, strict=True):
        bar = cells(owners, full, room).ljust(room)
        if mark is not None:
            bar = bar[:mark] + BUDGET_MARK + bar[mark + 1 :]
        head = f"{_pad(words(name), NAME_WIDTH)}{format_bytes(size):>{SIZE_WIDTH}}  "
        lines.append(_colored(head, bar.rstrip()))
    if is_far and budget_bytes is not None:
        text = words("budget_far", budget=format_bytes(budget_bytes))
        lines.append(_colored(" " * (NAME_WIDTH + SIZE_WIDTH + 2), text, plain=True))
    return lines


def is_far_off(budget_bytes: int | None, most_bytes: int) -> bool:
    """Whether bars drawn to the budget would be too short to read."""
    return budget_bytes is not None and budget_bytes > FAR * most_bytes


def step_area(
    timeline: Sequence[Mapping[str, Any]], base: Owners, budget_bytes: int | None, width: int, words: Words,
    height: int = AREA_HEIGHT,
) -> list[Text]:  # fmt: skip
    """One step from left to right, what lives at each moment from bottom to top.

    Args:
        timeline: moments in order, each with `part` and `owners`.
        base: what is there all the time besides (context, workspaces).
    """
    room = max(width - SIZE_WIDTH - 2, 20)
    columns = _columns(timeline, room)
    stacks = [{**base, **{k: v + base.get(k, 0) for k, v in moment["owners"].items()}} for moment in columns]
    most = max(sum(stack.values()) for stack in stacks)
    near_budget = budget_bytes is not None and not is_far_off(budget_bytes, most)
    full = max(most, budget_bytes or 0) if near_budget else most
    drawn = [cells(stack, full, height).ljust(height) for stack in stacks]
    lines = []
    for row in reversed(range(height)):
        text = "".join(column[row] for column in drawn)
        top = full * (row + 1) / height
        is_budget = near_budget and budget_bytes is not None and top - full / height < budget_bytes <= top
        label = format_bytes(int(top)) if row in (height - 1, height // 2) else ""
        if is_budget:
            text, label = text.replace(" ", "-"), words("budget")
        lines.append(_colored(f"{_pad(label, SIZE_WIDTH, right=True)} {BUDGET_MARK if not is_budget else '+'}", text))
    lines.append(_colored(" " * (SIZE_WIDTH + 2), _axis([moment["part"] for moment in columns], words), plain=True))
    return lines


def _columns(timeline: Sequence[Mapping[str, Any]], room: int) -> list[Mapping[str, Any]]:
    """At most `room` moments: of each run of neighbours the highest. A short step is stretched."""
    count = len(timeline)
    if count <= room:
        repeat = max(1, room // max(count, 1))
        return [moment for moment in timeline for _ in range(repeat)]

    def total(moment: Mapping[str, Any]) -> int:
        return sum(moment["owners"].values())

    return [max(timeline[i * count // room : (i + 1) * count // room], key=total) for i in range(room)]


def part_runs(parts: Sequence[str]) -> list[tuple[str, int, int]]:
    """(word's key, first, last + 1) of each run of moments in the same part of the step."""
    runs: list[tuple[str, int, int]] = []
    for index, part in enumerate(parts):
        key = PARTS.get(part, part)
        if runs and runs[-1][0] == key:
            runs[-1] = (key, runs[-1][1], index + 1)
        else:
            runs.append((key, index, index + 1))
    return runs


def _axis(parts: Sequence[str], words: Words) -> str:
    """The names of the parts in the middle of theirs; one that finds no room is left out."""
    from rich.cells import cell_len

    line = ""
    for key, start, end in part_runs(parts):
        name = words(key)
        place = max(0, min((start + end - cell_len(name)) // 2, len(parts) - cell_len(name)))
        if cell_len(line) + (1 if line else 0) <= place:
            line = _pad(line, place) + name
    return line


def legend_lines(owners: Sequence[Owners], plan: Mapping[str, Any], width: int, words: Words) -> list[Text]:
    """`W weights (bf16)   A activations ...`, as many lines as it takes."""
    keys = {key for one in owners for key in grouped(one)}
    lines: list[Any] = []
    from rich.text import Text

    line = Text()
    for group, name in legend(keys, plan, words.lang):
        entry = Text.assemble((group.letter, group.color), f" {name}")
        if line and line.cell_len + 3 + entry.cell_len > width:
            lines.append(line)
            line = Text()
        line = Text.assemble(line, "   " if line else "", entry)
    return [*lines, line]


def _pad(text: str, width: int, *, right: bool = False) -> str:
    """To a width in columns, of which a Chinese character takes two."""
    from rich.cells import cell_len

    space = " " * max(0, width - cell_len(text))
    return space + text if right else text + space


_COLORS = {"|": "bold", "+": "bold", "-": "bold"}


def _colored(head: str, bar: str, plain: bool = False) -> Text:
    """The line with each letter in its group's colour; without colour it reads the same."""
    from rich.text import Text

    line = Text(head)
    if plain:
        return line.append(bar)
    colors = {group.letter: group.color for group in GROUPS} | _COLORS
    start = 0
    while start < len(bar):
        end = start
        while end < len(bar) and bar[end] == bar[start]:
            end += 1
        line.append(bar[start:end], style=colors.get(bar[start], ""))
        start = end
    return line
