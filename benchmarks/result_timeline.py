"""Draws what runs when, of a table in results/ with lanes and intervals; write_results.py places the figure."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from results import ROOT, Table

sys.path.insert(0, str(ROOT / "docs" / "figures"))

from drawing import BLUE, GREEN, GREY, ORANGE, PINK, VIOLET, Drawing

COLOURS = {
    "forward": BLUE,
    "backward": VIOLET,
    "weights": GREEN,
    "gradients": ORANGE,
    "norm": GREY,
    "step": PINK,
}
WIDTH, LEFT, RIGHT, LANE, GAP = 840, 150, 15, 26, 10  # pixels
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between labels


@dataclass(frozen=True)
class Timeline:
    """Lanes, and work on them.

    Attributes:
        title: one line for those who cannot see the figure.
        caption: below the lanes.
        table: has the columns ``lane``, ``work``, ``begin`` and ``end``, in seconds.
    """

    title: str
    caption: str
    table: Table

    def figure(self) -> str:
        """The figure as SVG."""
        lanes, works, begins, ends = (self.table.column(name) for name in ("lane", "work", "begin", "end"))
        last = max(float(str(end)) for end in ends.values())
        unit = (WIDTH - LEFT - RIGHT) / last
        drawing = Drawing(WIDTH, self.title)
        drawing.legend(LEFT, 16, {work: COLOURS[work] for work in COLOURS if work in works.values()})
        top = 34.0
        places = {str(lane): top + index * (LANE + GAP) for index, lane in enumerate(dict.fromkeys(lanes.values()))}
        for lane, y in places.items():
            drawing.text(LEFT - 10, y + LANE / 2 + 4, lane, "end")
            drawing.rect(LEFT, y, last * unit, LANE, fill=GREY, fill_opacity="0.1")
        for place, lane in lanes.items():
            begin, end = (float(str(times[place])) for times in (begins, ends))
            drawing.rect(
                LEFT + begin * unit,
                places[str(lane)],
                max((end - begin) * unit, 0.5),
                LANE,
                fill=COLOURS[str(works[place])],
            )
        bottom = top + len(places) * (LANE + GAP)
        step = next((tick for tick in TICKS if last / tick <= 12), last)
        for index in range(int(last / step) + 1):
            x = LEFT + index * step * unit
            drawing.line([(x, top), (x, bottom)], stroke_opacity="0.25")
            drawing.text(x, bottom + 14, f"{index * step:g}", "middle", font_size="12")
        drawing.text(LEFT, bottom + 32, self.caption)
        return drawing.svg(round(bottom + 42))
