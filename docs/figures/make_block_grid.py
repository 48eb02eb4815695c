"""Draws block-grid.svg: the blocks of a parameter on two ranks, under three ways of sharding.

    python docs/figures/make_block_grid.py

The package's layout says which blocks there are, who holds them, and which are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from drawing import BLUE, GREY, ORANGE, PINK, SMALL, Drawing
from shardopt.layout import BlockGrid, FlatShard, GridPartition, Shard
from shardopt.layout.partition import Cut

TARGET = Path(__file__).with_name("block-grid.svg")
GRID = BlockGrid((3, 300), 128)
RANKS = (BLUE, ORANGE)
WIDTH, UNIT, GAP = 840, 1.15, 4  # pixels: of the figure, of an element, between blocks
ROW, PITCH = 30, 54  # of a row, and from row to row


class Piece(NamedTuple):
    """Elements of one block of one row that a rank holds; ``cut``: other ranks hold the rest of the block."""

    rank: int
    row: int
    col: int
    cols: int
    cut: bool


def dim_sharded(dim: int) -> list[Shard]:
    """The shards of a parameter that is sharded along one dimension, as DTensors are."""
    cut = GridPartition((Cut(dim, len(RANKS), 1),))
    return [Shard(GRID.global_shape, cut, rank) for rank in range(len(RANKS))]


def flat_sharded() -> list[FlatShard]:
    """The shards of a parameter that is flattened and divided evenly, as by FSDP1 and ZeRO."""
    size = -(-GRID.rows * GRID.row_numel // len(RANKS))
    return [FlatShard(GRID.global_shape, -rank * size, size) for rank in range(len(RANKS))]


def pieces(shards: Sequence[Shard]) -> Iterator[Piece]:
    """The blocks of all ranks, those that are cut in pieces."""
    for rank, shard in enumerate(shards):
        for rectangle in shard.rectangles(GRID):
            for alike in rectangle.separate_cut_blocks(GRID):
                for part in alike.split(GRID.block_size, GRID.block_size):
                    for row in range(part.rows):
                        at = divmod(part.first_element + row * part.global_row_numel, GRID.row_numel)
                        yield Piece(rank, *at, part.cols, part.cut)


def draw_panel(drawing: Drawing, x: float, y: float, title: str, shards: Sequence[Shard]) -> list[Piece]:
    """A panel with its title on the baseline ``y``; returns the pieces of cut blocks."""
    drawing.text(x, y, title, bold=True)
    y += 30
    for row in range(GRID.rows):
        drawing.text(x - 8, y + PITCH * row + 20, f"row {row}", "end")
    cut = []
    for piece in pieces(shards):
        left = x + UNIT * piece.col + GAP * (piece.col // GRID.block_size)
        top, width = y + PITCH * piece.row, UNIT * piece.cols
        drawing.rect(left, top, width, ROW, fill=RANKS[piece.rank])
        drawing.text(left + width / 2, top + 20, str(piece.cols), "middle", fill="#ffffff")
        if piece.cut:
            cut.append(piece)
    for piece in cut:
        if piece.col % GRID.block_size == 0:
            left = x + UNIT * piece.col + GAP * (piece.col // GRID.block_size)
            size = min(GRID.block_size, GRID.row_numel - piece.col)
            top = y + PITCH * piece.row
            style = {"fill": "none", "stroke": PINK, "stroke_width": "2.5"}
            drawing.rect(left - 2, top - 2, UNIT * size + 4, ROW + 4, **style)
            drawing.text(left + UNIT * size / 2, top - 7, "cut block", "middle", fill=PINK, font_size=SMALL)
    return cut


def draw_exchange(drawing: Drawing, x: float, y: float, cut: Sequence[Piece]) -> None:
    """The exchange of a cut block's owners, in a panel with its title on the baseline ``y``."""
    drawing.text(x, y, "Step of the cut block in row 1", bold=True)
    unit, left, top = 2.75, x, y + 16
    drawing.rect(left - 2, top - 2, unit * GRID.block_size + 4, ROW + 4, fill="none", stroke=PINK, stroke_width="2.5")
    middles = []
    for piece in cut:
        width = unit * piece.cols
        drawing.rect(left, top, width, ROW, fill=RANKS[piece.rank])
        drawing.text(left + width / 2, top + 20, str(piece.cols), "middle", fill="#ffffff")
        middles.append(left + width / 2)
        left += width
    middle = x + unit * GRID.block_size / 2
    box = y + 84
    for at, end in zip(middles, (middle - 70, middle + 70), strict=True):
        drawing.arrow((at, top + ROW + 6), (end, box - 4))
    drawing.rect(middle - 150, box, 300, 26, fill="none", stroke=GREY, rx="4")
    drawing.text(middle, box + 17, "all-reduce (maximum), 8 bytes per moment", "middle", font_size=SMALL)
    sent = ["Each rank sends the extremes of its piece: the", "largest and the smallest nonzero magnitude."]
    received = ["Both ranks get the extremes of the whole block,", "and so keep the same scales."]
    drawing.lines(middle, box + 46, sent, "middle")
    drawing.lines(middle, box + 80, received, "middle")


def figure() -> str:
    """The figure as SVG."""
    by_rows, flat, by_columns = dim_sharded(0), flat_sharded(), dim_sharded(1)
    of = f"{GRID.rows} rows of {GRID.row_numel} elements in blocks of {GRID.block_size}"
    drawing = Drawing(WIDTH, f"Blocks on two ranks: {of}")
    left, right = 50, 480
    drawing.text(left, 14, f"{of}; numbers are elements")
    drawing.legend(right + 176, 14, {f"rank {rank}": colour for rank, colour in enumerate(RANKS)})
    draw_panel(drawing, left, 48, "FSDP2: whole rows, no block is cut", by_rows)
    cut = draw_panel(drawing, right, 48, f"FSDP1, ZeRO: {flat[0].numel} elements each", flat)
    draw_panel(drawing, left, 258, f"Tensor parallel: {by_columns[0].cols} columns each", by_columns)
    draw_exchange(drawing, right, 258, cut)
    return drawing.svg(444)


if __name__ == "__main__":
    TARGET.write_text(figure())
