"""A picture as a list of shapes, and its two forms: SVG as text, PNG through pillow."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

FONT = "system-ui, 'Segoe UI', 'Noto Sans CJK SC', sans-serif"
PNG_SCALE = 2  # pixels per unit, for screens of high density
MEAN_ADVANCE = 0.56  # width of a letter over its size, an average of sans-serif fonts; for placing, not for fitting


@dataclass
class Canvas:
    """Shapes in the order in which they are painted; the origin is at the top left, units are SVG pixels."""

    width: float
    height: float
    shapes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.shapes.append(("box", dict(x=x, y=y, width=width, height=height, fill=fill)))

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str) -> None:
        self.shapes.append(("line", dict(x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke)))

    def polygon(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        self.shapes.append(("polygon", dict(points=list(points), fill=fill)))

    def text(self, x: float, y: float, text: str, size: float, fill: str, bold: bool = False) -> None:
        """Text whose baseline begins at (x, y)."""
        self.shapes.append(("text", dict(x=x, y=y, text=text, size=size, fill=fill, bold=bold)))

    @staticmethod
    def text_width(text: str, size: float) -> float:
        """About how wide a text is; a Chinese character is as wide as it is high."""
        return sum(size if unicodedata.east_asian_width(c) in "WF" else size * MEAN_ADVANCE for c in text)


def write_svg(canvas: Canvas, path: Path) -> None:
    """Raises OSError when the file cannot be written."""
    size = f"{canvas.width:g} {canvas.height:g}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{canvas.width:g}" '
        f'height="{canvas.height:g}" font-family="{escape(FONT)}" role="img">\n<rect width="100%" height="100%" '
        'fill="#ffffff"/>\n'
    )
    path.write_text(head + "\n".join(_svg(kind, v) for kind, v in canvas.shapes) + "\n</svg>\n", encoding="utf-8")


def _svg(kind: str, v: dict[str, Any]) -> str:
    if kind == "box":
        return (f'<rect x="{v["x"]:.2f}" y="{v["y"]:.2f}" width="{v["width"]:.2f}" height="{v["height"]:.2f}" '
                f'fill="{v["fill"]}"/>')  # fmt: skip
    if kind == "line":
        return (f'<line x1="{v["x1"]:.2f}" y1="{v["y1"]:.2f}" x2="{v["x2"]:.2f}" y2="{v["y2"]:.2f}" '
                f'stroke="{v["stroke"]}" stroke-width="1.5"/>')  # fmt: skip
    if kind == "polygon":
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in v["points"])
        return f'<polygon points="{points}" fill="{v["fill"]}"/>'
    weight = ' font-weight="600"' if v["bold"] else ""
    return (f'<text x="{v["x"]:.2f}" y="{v["y"]:.2f}" font-size="{v["size"]:g}" fill="{v["fill"]}"{weight} '
            f'xml:space="preserve">{escape(v["text"])}</text>')  # fmt: skip


def write_png(canvas: Canvas, path: Path) -> None:
    """Raises ImportError without pillow, OSError when the file cannot be written."""
    from PIL import Image, ImageDraw, ImageFont

    scale = PNG_SCALE
    image = Image.new("RGB", (round(canvas.width * scale), round(canvas.height * scale)), "#ffffff")
    brush = ImageDraw.Draw(image)
    fonts: dict[float, Any] = {}
    for kind, v in canvas.shapes:
        if kind == "box":
            x, y = v["x"] * scale, v["y"] * scale
            corner = (x + v["width"] * scale, y + v["height"] * scale - 1)
            if corner[0] - x >= 1:
                brush.rectangle([(x, y), (corner[0] - 1, corner[1])], fill=v["fill"])
        elif kind == "line":
            ends = [(v["x1"] * scale, v["y1"] * scale), (v["x2"] * scale, v["y2"] * scale)]
            brush.line(ends, fill=v["stroke"], width=round(1.5 * scale))
        elif kind == "polygon":
            brush.polygon([(x * scale, y * scale) for x, y in v["points"]], fill=v["fill"])
        else:
            size = v["size"] * scale
            font = fonts.setdefault(size, ImageFont.load_default(size))
            width = 1 if v["bold"] else 0
            brush.text((v["x"] * scale, v["y"] * scale), v["text"], fill=v["fill"], font=font, anchor="ls",
                       stroke_width=width // 2 if scale == 1 else width * (scale // 2) // 2)  # fmt: skip
    image.save(path, format="PNG")
