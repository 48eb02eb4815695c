"""Draws muon-step.svg: one step of Muon over four ranks, each of which holds a quarter of four matrices.

    python docs/figures/make_muon.py

Owners are those that the code chooses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from drawing import BLUE, GREEN, GREY, ORANGE, SMALL, VIOLET, Drawing
from shardopt.kernels.newton_schulz import QUINTIC, NewtonSchulz
from shardopt.state.rule import Orthogonalized
from shardopt.step.inputs import StepParameter
from shardopt.step.muon.matrices import Matrix, waves_of

TARGET = Path(__file__).with_name("muon-step.svg")
WIDTH, RANKS, LANE, SIDE = 840, 4, 84, 60  # pixels: of the figure, of a rank's lane, of a square
COLOURS = {"query": BLUE, "key": ORANGE, "up": GREEN, "down": VIOLET}
SHAPES = {"query": (512, 512), "key": (512, 512), "up": (1024, 512), "down": (512, 1024)}
#: Left edges of the columns, and their headings.
COLUMNS = {
    90: ("1  momentum", ["each rank, on its", "rows, in 8 bits"]),
    265: ("2  all-to-all", ["directions, bfloat16,", "to the owners"]),
    420: ("3  Newton-Schulz", ["the owner, on the", "whole matrix"]),
    575: ("4  all-to-all", ["results, bfloat16,", "to the rows' ranks"]),
    720: ("5  update", ["each rank, on", "its rows"]),
}


class _Ranks:
    rank = 0


def owners() -> dict[str, int]:
    """The rank that computes each matrix."""
    options = Orthogonalized(NewtonSchulz((QUINTIC,) * 5, 1e-7), None, lambda rows, cols: 1.0, "muon_apply")
    ranks, matrices = cast(Any, _Ranks()), []
    for number, (rows, cols) in enumerate(SHAPES.values()):
        part = rows // RANKS
        parts = tuple([((part * rank, 0), (part, cols))] for rank in range(RANKS))
        parameter = StepParameter(number, "", 0, number, torch.device("cpu"), None, number, None, False)
        matrices.append(Matrix(parameter, 0, options, rows, cols, 0, 0, ranks, parts, (0,) * RANKS))
    (wave,) = waves_of(matrices, 1 << 30, "cpu", by_number=False)
    names = list(SHAPES)
    return {names[m.parameter.index]: m.owner for m in wave}


def rows_of_a_rank(drawing: Drawing, x: float, y: float, rank: int) -> None:
    """A rank's quarter of each matrix, in the outline of the whole."""
    for index, colour in enumerate(COLOURS.values()):
        left = x + 32 * index
        drawing.rect(left, y, 26, SIDE, fill="none", stroke=colour, stroke_dasharray="3 3")
        drawing.rect(left, y + SIDE / RANKS * rank, 26, SIDE / RANKS, fill=colour)


def figure() -> str:
    """The SVG."""
    drawing = Drawing(WIDTH, "A step of Muon over four ranks: each matrix is whole on one of them, its owner")
    for x, (name, lines) in COLUMNS.items():
        drawing.text(x, 20, name, bold=True)
        drawing.lines(x, 38, lines)
    top, owner_of = 76, owners()
    middle = {rank: top + LANE * rank + SIDE / 2 for rank in range(RANKS)}
    for rank in range(RANKS):
        y = top + LANE * rank
        drawing.text(1, y + SIDE / 2 + 4, f"rank {rank}", bold=True)
        rows_of_a_rank(drawing, 90, y, rank)
        rows_of_a_rank(drawing, 712, y, rank)
        drawing.line([(1, y + SIDE + 12), (WIDTH - 1, y + SIDE + 12)], stroke_opacity="0.3")
    for name, owner in owner_of.items():
        colour, y = COLOURS[name], middle[owner]
        for rank in range(RANKS):
            drawing.arrow((225, middle[rank]), (434, y), stroke=colour, stroke_opacity="0.7")
            drawing.arrow((526, y), (706, middle[rank]), stroke=colour, stroke_opacity="0.7")
    for name, owner in owner_of.items():
        colour, y = COLOURS[name], middle[owner]
        drawing.rect(438, y - SIDE / 2, 84, SIDE, fill=colour, fill_opacity="0.25", stroke=colour, rx="4")
        drawing.text(480, y - 2, name, "middle", bold=True)
        drawing.text(480, y + 16, f"{SHAPES[name][0]} x {SHAPES[name][1]}", "middle", font_size=SMALL, fill=GREY)
    drawing.legend(90, top + LANE * RANKS + 14, COLOURS)
    return drawing.svg(top + LANE * RANKS + 24)


if __name__ == "__main__":
    TARGET.write_text(figure())
