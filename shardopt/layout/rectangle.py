"""The rectangle: elements of a shard that the kernels step together, and how it is divided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardopt.layout.block_grid import BlockGrid


class Rectangle(NamedTuple):
    """Elements of a shard that form a matrix: the same columns of some successive rows.

    Attributes:
        element: index of the first element in the local tensor.
        rows: number of rows.
        first_col: first column in the global row.
        cols: number of columns.
        row_stride: elements from row to row in the local tensor.
        stride: elements from row to row in the flattened parameter.
        block: index, in the local scales, of the block that holds the first element.
        blocks_stride: blocks from row to row in the local scales.
        cut: whether each row is a part of one block, of which other ranks hold the rest. Before :meth:`divided`, a
            rectangle may hold whole blocks and cut ones.
    """

    element: int
    rows: int
    first_col: int
    cols: int
    row_stride: int
    stride: int
    block: int
    blocks_stride: int
    cut: bool = False

    def split(self, limit: int, block_size: int) -> Iterator[Rectangle]:
        """The rectangle's parts, in order: rows, or whole blocks of one row.

        Args:
            limit: elements of a part, at most; but blocks are never divided.
            block_size: elements per block.
        """
        if self.rows * self.cols <= limit:
            yield self
            return
        if self.cols <= limit:
            some = limit // self.cols
            for row in range(0, self.rows, some):
                first, block = self.element + row * self.row_stride, self.block + row * self.blocks_stride
                yield self._replace(element=first, rows=min(some, self.rows - row), block=block)
            return
        width = max(limit // block_size, 1) * block_size
        end = self.first_col + self.cols
        for row in range(self.rows):
            first, block = self.element + row * self.row_stride, self.block + row * self.blocks_stride
            col = self.first_col
            while col < end:
                stop = min(col // block_size * block_size + width, end)
                blocks = col // block_size - self.first_col // block_size
                element, cols = first + col - self.first_col, stop - col
                yield self._replace(
                    element=element, rows=1, first_col=col, cols=cols, row_stride=cols, block=block + blocks
                )
                col = stop

    def ended(self, ends: Iterable[int]) -> Iterator[Rectangle]:
        """The rectangle's parts, in order, cut before some elements of the local tensor.

        Args:
            ends: indices of these elements, ascending. If the rectangle has several rows, each element begins a row.
        """
        rest = self
        for end in ends:
            numel = end - rest.element
            if not 0 < numel < (rest.rows - 1) * rest.row_stride + rest.cols:
                continue
            if rest.rows == 1:
                yield rest._replace(cols=numel)
                rest = rest._replace(element=end, first_col=rest.first_col + numel, cols=rest.cols - numel)
            else:
                rows = -(-numel // rest.row_stride)
                yield rest._replace(rows=rows)
                element, block = rest.element + rows * rest.row_stride, rest.block + rows * rest.blocks_stride
                rest = rest._replace(element=element, rows=rest.rows - rows, block=block)
        yield rest

    def divided(self, grid: BlockGrid) -> Iterator[Rectangle]:
        """The rectangle's columns of whole blocks, and each cut block by itself."""
        size, end, col = grid.block_size, self.first_col + self.cols, self.first_col
        while col < end:
            block = col // size
            block_end = min((block + 1) * size, grid.row_numel)
            whole = col == block * size and end >= block_end
            stop = min(end, block_end)
            if whole:
                stop = end if grid.is_boundary(end) else end // size * size
            yield self._replace(
                element=self.element + col - self.first_col,
                first_col=col,
                cols=stop - col,
                block=self.block + block - self.first_col // size,
                cut=not whole,
            )
            col = stop
