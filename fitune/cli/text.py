"""Lines of text on a terminal: columns, line breaks, short names of cards."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[tuple[str, ...]], left: Sequence[int]) -> list[str]:
    """Rows of cells as lines of equal columns, two spaces apart; `left` are those that are aligned to the left."""
    from rich.cells import cell_len

    widths = [max(cell_len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(cell))
            cells.append(cell + space if i in left else space + cell)
        lines.append("  ".join(cells).rstrip())
    return lines


def wrapped(text: str, width: int) -> list[str]:
    """A text in lines of at most `width` cells, broken at spaces or between Chinese characters."""
    from rich.console import Console
    from rich.text import Text

    return [line.plain.rstrip() for line in Text(text).wrap(Console(width=width), width)]


def short_name(name: str) -> str:
    """A card's name without its family's."""
    for word in ("GeForce ", "Tesla ", "Instinct ", "Radeon ", " Generation", " Workstation", " (DGX Spark)"):
        name = name.replace(word, "")
    return name
