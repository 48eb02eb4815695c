"""Draws codec-error.svg: what codecs make of the numbers of a block, by their size within the block.

    python docs/figures/make_codec_error.py

Random blocks of AdamW's moments are encoded and decoded with the package's codecs. Roots of second moments are
log-uniform over five decades, first moments a tenth of the root up to all of it, log-uniform, with random signs.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from drawing import BLUE, GREEN, ORANGE, PINK, SMALL, VIOLET, Drawing, Point
from shardopt.codec import Moment, decode_moments, encode_moments, get_codec

TARGET = Path(__file__).with_name("codec-error.svg")
CODECS = {"log8": BLUE, "companded8": ORANGE, "dynamic8": GREEN, "log4": PINK, "bf16": VIOLET}
BLOCKS, BLOCK_SIZE, DECADES, BINS = 2000, 128, 5, 50
MOMENTS = [Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False)]
Curve = list[tuple[float, float]]


def measure() -> dict[str, tuple[Curve, Curve]]:
    """Median relative errors of roots and updates, by codec.

    Returns:
        Per codec two curves of points ``(x, error)``: errors of the root of the second moment, and of the first moment
        over the root. ``x`` is the decimal logarithm of the root over the largest one in its block, from 0 downwards.
    """
    generator, shape = np.random.default_rng(0), (BLOCKS, BLOCK_SIZE)
    root = torch.from_numpy(10 ** (-DECADES * generator.random(shape))).float()
    update = torch.from_numpy(10 ** -generator.random(shape) * generator.choice([-1, 1], shape)).float()
    noise = torch.from_numpy(generator.integers(0, 2**32, shape))
    values = [update * root, root * root]
    size = (root / root.amax(-1, keepdim=True)).double().log10()
    which = (-size * BINS / DECADES).long().clamp(max=BINS - 1)
    found = {}
    for name in CODECS:
        coded = encode_moments(get_codec(name), MOMENTS, values, random=noise)
        (first, second), _ = decode_moments(get_codec(name), MOMENTS, coded)
        of_root, of_update = (second.sqrt() / root - 1).abs(), (first / second.sqrt() / update - 1).abs()
        found[name] = _medians(of_root, which), _medians(of_update, which)
    return found


def _medians(error: torch.Tensor, which: torch.Tensor) -> Curve:
    """The median in each bin, at the bin's middle."""
    return [(-(k + 0.5) * DECADES / BINS, float(error[which == k].median())) for k in range(BINS)]


class Panel:
    """A panel with logarithmic axes; ``x``, ``y``: its left upper corner."""

    WIDTH, HEIGHT, LOW, HIGH = 330, 250, -3.5, 1.0  # pixels; decimal logarithms of the smallest and largest error

    def __init__(self, drawing: Drawing, x: float, y: float) -> None:
        self._drawing, self._x, self._y = drawing, x, y

    def at(self, x: float, log_error: float) -> Point:
        """Where a point of a curve is."""
        share = (self.HIGH - log_error) / (self.HIGH - self.LOW)
        return self._x + self.WIDTH * (1 + x / DECADES), self._y + self.HEIGHT * share

    def draw_axes(self, title: str, below: str) -> None:
        """The axes with their labels."""
        drawing = self._drawing
        drawing.text(self._x, self._y - 14, title, bold=True)
        for log_error, label in ((-3, "0.1%"), (-2, "1%"), (-1, "10%"), (0, "100%"), (1, "1000%")):
            left, y = self.at(-DECADES, log_error)
            drawing.line([(left, y), (left + self.WIDTH, y)], stroke_opacity="0.3")
            drawing.text(left - 8, y + 4, label, "end", font_size=SMALL)
        for power, label in enumerate(("1", "1/10", "1/100", "1/1000", "1/10⁴", "1/10⁵")):
            x, y = self.at(-power, self.LOW)
            drawing.line([(x, y), (x, y + 5)])
            drawing.text(x, y + 19, label, "middle", font_size=SMALL)
        drawing.line([self.at(-DECADES, self.HIGH), self.at(-DECADES, self.LOW), self.at(0, self.LOW)])
        drawing.text(self._x + self.WIDTH / 2, self._y + self.HEIGHT + 40, below, "middle", font_size=SMALL)

    def draw_curve(self, curve: Curve, **style: str) -> None:
        """A curve, from the right to where it leaves the panel."""
        logs = [(x, float(np.log10(error))) for x, error in curve]
        points = [self.at(*logs[0])]
        for (x, before), (next_x, after) in pairwise(logs):
            if after > self.HIGH:
                share = (self.HIGH - before) / (after - before)
                points.append(self.at(x + share * (next_x - x), self.HIGH))
                break
            points.append(self.at(next_x, after))
        self._drawing.line(points, stroke_width="2", stroke_linejoin="round", **style)


def figure() -> str:
    """The figure as SVG."""
    drawing = Drawing(840, "Relative error of decoded moments by their size within the block, by codec")
    drawing.text(60, 14, "median relative error of decoded values")
    panels = Panel(drawing, 60, 76), Panel(drawing, 485, 76)
    below = "√v relative to the largest √v in the block"
    for panel, title in zip(panels, ("Root of the second moment, √v", "Update, m / √v"), strict=True):
        panel.draw_axes(title, below)
    drawing.legend(412, 14, CODECS)
    for name, curves in measure().items():
        for panel, curve in zip(panels, curves, strict=True):
            # Dashed, and after companded8: in parts they are the same.
            panel.draw_curve(curve, stroke=CODECS[name], **({"stroke_dasharray": "6 5"} if name == "log4" else {}))
    return drawing.svg(376)


if __name__ == "__main__":
    TARGET.write_text(figure())
