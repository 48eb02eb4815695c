"""Draws figures in results/ as horizontal bars in groups, with their values; write_results.py places them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from results import ROOT, Cell

sys.path.insert(0, str(ROOT / "docs" / "figures"))

from drawing import BLUE, GREEN, ORANGE, PINK, SMALL, VIOLET, Drawing

COLOURS = (BLUE, ORANGE, GREEN, VIOLET, PINK)
WIDTH, LEFT, RIGHT, BAR, GAP = 840, 292, 60, 18, 9  # pixels; RIGHT is left free for values
LETTER = 7.6  # pixels that a letter takes at most, in the mean


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
            ValueError: there are more series than colours, a text is longer than its place, or there is no bar.
        """
        if len(self.series) > len(COLOURS):
            raise ValueError(f"got {len(self.series)} series in {self.title!r}, expected at most {len(COLOURS)}")
        for text, width in ((self.caption, WIDTH - LEFT), *((group, LEFT - 10) for group in self.groups)):
            if LETTER * len(text) > width:
                letters = round(width // LETTER)
                raise ValueError(f"got {len(text)} letters in {text!r}, expected at most {letters} there; shorten it")
        drawing = Drawing(WIDTH, self.title)
        drawing.legend(LEFT, 16, dict(zip(self.series, COLOURS, strict=False)))
        shown = {group: self._of_group(group) for group in self.groups}
        if not any(shown.values()):
            raise ValueError(f"got no figures for {self.title!r}, expected some; run the whole benchmark")
        ends = [size for bars in shown.values() for size, _ in bars]
        unit = (WIDTH - LEFT - RIGHT) / max(*ends, self.line[0] if self.line else 0)
        at_line = LEFT + self.line[0] * unit if self.line else 0.0
        top = y = 34.0 + (18 if self.line else 0)
        for group, bars in shown.items():
            drawing.text(LEFT - 10, y + len(bars) * BAR / 2 + 4, group, "end")
            for size, colour in bars:
                drawing.rect(LEFT, y + 1, width := max(size, 0) * unit, BAR - 3, fill=colour)
                x = LEFT + width
                text = f"{size:.{self.digits}f}"
                if self.line and x < at_line < x + 14 + LETTER * len(text):
                    x = at_line
                drawing.text(x + 7, y + 13, text, bold=True, font_size=SMALL)
                y += BAR
            y += GAP
        if self.line:
            drawing.line([(at_line, top - 3), (at_line, y - GAP + 2)], stroke_dasharray="4 3", stroke_opacity="0.6")
            drawing.text(at_line, top - 8, self.line[1], "middle", font_size=SMALL)
        drawing.text(LEFT, y + 12, self.caption)
        return drawing.svg(round(y + 22))

    def _of_group(self, group: str) -> list[tuple[float, str]]:
        """Figure and colour of each bar; of several runs the mean."""
        cells = [(of.get(group), colour) for of, colour in zip(self.series.values(), COLOURS, strict=False)]
        return [(mean(cell) if isinstance(cell, list) else float(cell), colour) for cell, colour in cells if cell]
