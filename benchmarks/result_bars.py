"""Draws figures in results/ as horizontal bars in groups, with their values; write_results.py places them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from results import ROOT, Cell

sys.path.insert(0, str(ROOT / "docs" / "figures"))

from drawing import BLUE, GREEN, ORANGE, PINK, VIOLET, Drawing

COLOURS = (BLUE, ORANGE, GREEN, VIOLET, PINK)
WIDTH, LEFT, RIGHT, BAR, GAP = 840, 250, 90, 17, 9  # pixels; RIGHT is left free for values


@dataclass(frozen=True)
class Bars:
    """Groups of bars.

    Attributes:
        title: one line for those who cannot see the figure.
        caption: the unit and the machine, below the bars.
        groups: the names of the groups, from above.
        series: figures by group, by the series' names; what is missing has no bar.
        digits: of the values, behind the point.
        line: a figure at which a line is drawn through all bars, and its name.
    """

    title: str
    caption: str
    groups: Sequence[str]
    series: Mapping[str, Mapping[str, Cell]]
    digits: int
    line: tuple[float, str] | None = None

    def figure(self) -> str:
        """The figure as SVG.

        Raises:
            ValueError: there are more series than colours.
        """
        if len(self.series) > len(COLOURS):
            raise ValueError(f"got {len(self.series)} series in {self.title!r}, expected at most {len(COLOURS)}")
        drawing = Drawing(WIDTH, self.title)
        drawing.legend(LEFT, 16, dict(zip(self.series, COLOURS, strict=False)))
        largest = max(
            size for cells in self.series.values() for group in self.groups for size in _sizes(cells.get(group))
        )
        unit = (WIDTH - LEFT - RIGHT) / max(largest, self.line[0] if self.line else 0)
        top = y = 34.0 + (18 if self.line else 0)
        for group in self.groups:
            shown = [(cells.get(group), colour) for cells, colour in zip(self.series.values(), COLOURS, strict=False)]
            bars = [(sizes, colour) for cell, colour in shown if (sizes := _sizes(cell))]
            drawing.text(LEFT - 10, y + len(bars) * BAR / 2 + 4, group, "end")
            for found, colour in bars:
                width, text = max(mean(found), 0) * unit, ", ".join(f"{size:.{self.digits}f}" for size in found)
                drawing.rect(LEFT, y + 1, width, BAR - 3, fill=colour)
                drawing.text(LEFT + width + 7, y + 13, text, bold=True, font_size="12")
                y += BAR
            y += GAP
        if self.line:
            x = LEFT + self.line[0] * unit
            drawing.line([(x, top - 3), (x, y - GAP + 2)], stroke_dasharray="4 3", stroke_opacity="0.6")
            drawing.text(x, top - 8, self.line[1], "middle", font_size="12")
        drawing.text(LEFT, y + 12, self.caption)
        return drawing.svg(round(y + 22))


def _sizes(cell: Cell) -> list[float]:
    """Figures of one run or several, whose mean has a bar."""
    if isinstance(cell, list):
        return cell
    return [] if cell is None else [float(cell)]
