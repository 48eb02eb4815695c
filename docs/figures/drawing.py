"""Writes an SVG shape by shape, in the colours that all figures share.

Text is of a medium grey, and there is no background, so that light and dark pages show figures equally well. Equal
calls give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

GREY = "#78828e"
#: The size of small text: 11 pixels where a page shows a figure of 840 at 690.
SMALL = "13.5"
BLUE, ORANGE, GREEN, VIOLET, PINK = "#3b82d6", "#e0822a", "#2fa05a", "#8f6ad0", "#d0487a"
#: Kinds of memory, in the order of stacked bars.
KINDS = {"weights": BLUE, "gradients": ORANGE, "optimizer state": GREEN, "master bits": VIOLET}

Point = tuple[float, float]


def number(x: float) -> str:
    """A length or coordinate in pixels, to a tenth."""
    return f"{x:.1f}".removesuffix(".0")


class Drawing:
    """A figure of this width, in pixels.

    Args:
        width: of the figure.
        title: one line for those who cannot see it.
    """

    def __init__(self, width: int, title: str) -> None:
        self._width, self._title, self._lines = width, title, list[str]()

    def text(self, x: float, y: float, text: str, anchor: str = "start", *, bold: bool = False, **style: str) -> None:
        """One line of text, on the baseline ``y``; ``anchor``: "start", "middle" or "end" is at ``x``."""
        named = {} if anchor == "start" else {"text-anchor": anchor}
        weight = {"font-weight": "bold"} if bold else {}
        inside = escape(text)
        self._add("text", {"x": number(x), "y": number(y), **named, **weight, **_attributes(style)}, inside)

    def lines(self, x: float, y: float, texts: Sequence[str], anchor: str = "start") -> None:
        """Several lines of small text, 16 pixels apart."""
        for index, text in enumerate(texts):
            self.text(x, y + 16 * index, text, anchor, font_size=SMALL)

    def rect(self, x: float, y: float, width: float, height: float, **style: str) -> None:
        """A rectangle."""
        place = {"x": x, "y": y, "width": width, "height": height}
        self._add("rect", {**{name: number(value) for name, value in place.items()}, **_attributes(style)})

    def line(self, points: Sequence[Point], **style: str) -> None:
        """A line through points."""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._add("polyline", {"points": path, **_attributes({"fill": "none", "stroke": GREY, **style})})

    def arrow(self, start: Point, end: Point, **style: str) -> None:
        """A line from one point to another, with a head."""
        length = math.dist(start, end)
        along = tuple((b - a) / length for a, b in zip(start, end, strict=True))
        back = end[0] - 8 * along[0], end[1] - 8 * along[1]
        side = -4 * along[1], 4 * along[0]
        self.line([start, back], **style)
        corners = [end, (back[0] + side[0], back[1] + side[1]), (back[0] - side[0], back[1] - side[1])]
        head = " ".join(f"{number(x)},{number(y)}" for x, y in corners)
        self._add("polygon", {"points": head, "fill": style.get("stroke", GREY)})

    def legend(self, x: float, y: float, entries: dict[str, str]) -> None:
        """Squares of the entries' colours with their names, in one line that has ``y`` as its baseline.

        The line begins at ``x``, or further left if it would be cut.
        """
        x = min(x, self._width - sum(40 + 7.6 * len(name) for name in entries))
        for name, colour in entries.items():
            self.rect(x, y - 11, 12, 12, fill=colour)
            self.text(x + 18, y, name)
            x += 40 + 7.6 * len(name)

    def svg(self, height: int) -> str:
        """The figure, cut off at this height."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} {height}" width="{self._width}" '
            f'height="{height}" font-family="system-ui, sans-serif" font-size="14" fill="{GREY}" role="img">'
        )
        return "\n".join([head, f"<title>{escape(self._title)}</title>", *self._lines, "</svg>"]) + "\n"

    def _add(self, tag: str, attributes: dict[str, str], inside: str = "") -> None:
        given = "".join(f' {name}="{value}"' for name, value in attributes.items())
        self._lines.append(f"<{tag}{given}>{inside}</{tag}>" if inside else f"<{tag}{given}/>")


def _attributes(style: dict[str, str]) -> dict[str, str]:
    """Attributes of SVG by their names in Python: ``stroke_width`` is ``stroke-width``."""
    return {name.replace("_", "-"): value for name, value in style.items()}
