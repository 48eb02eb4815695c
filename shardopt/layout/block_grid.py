"""The grid of quantization blocks, computed from a parameter's global shape alone, and rectangles for the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: Parameters whose rows have fewer elements keep float32 state: scales of so short blocks would save little memory.
MIN_ROW_NUMEL = 32


def is_quantized(global_shape: tuple[int, ...], min_quantized_numel: int) -> bool:
    """Whether a parameter's state is quantized: decided by its global shape, so that all ranks agree.

    Biases, norms, and parameters with fewer than ``min_quantized_numel`` elements or short rows keep float32 state.
    """
    numel = math.prod(global_shape)
    if len(global_shape) < 2 or numel < max(min_quantized_numel, 1):
        return False
    return numel // global_shape[0] >= MIN_ROW_NUMEL


@dataclass(frozen=True)
class BlockGrid:
    """How a parameter is cut into quantization blocks: runs of elements that share scales.

    Every row (a slice along dim 0, flattened) is cut into ``ceil(row_numel / block_size)`` blocks, the last one
    possibly short. Blocks never cross a row.
    """

    global_shape: tuple[int, ...]
    block_size: int

    @property
    def rows(self) -> int:
        return self.global_shape[0] if self.global_shape else 1

    @property
    def row_numel(self) -> int:
        return math.prod(self.global_shape[1:])

    @property
    def blocks_per_row(self) -> int:
        return -(-self.row_numel // self.block_size)

    def is_boundary(self, col: int) -> bool:
        """Whether cutting a row before its column ``col`` cuts no block: a block begins there, or the row ends."""
        return col % self.block_size == 0 or col == self.row_numel

    def block_of(self, element: int) -> int:
        """The index of the block that contains an element of the flattened parameter, counted row by row."""
        row, col = divmod(element, self.row_numel)
        return row * self.blocks_per_row + col // self.block_size


class Rectangle(NamedTuple):
    """Elements of a shard that a kernel steps as one matrix: the same columns of some successive rows.

    Attributes:
        local_start: index of the first element in the local tensor.
        first_element: index of the first element in the flattened parameter.
        row_stride: elements from row to row in the local tensor.
        global_row_numel: elements from row to row in the flattened parameter.
        local_block: index, in the local scales, of the block that holds the first element.
        scales_row_stride: blocks from row to row in the local scales.
        cut: whether each row is a part of one block, the rest of which is on other ranks. :meth:`separate_cut_blocks`
            sets this; until then, a rectangle may contain whole blocks and cut blocks.
    """

    local_start: int
    first_element: int
    rows: int
    cols: int
    row_stride: int
    global_row_numel: int
    local_block: int
    scales_row_stride: int
    cut: bool = False

    @property
    def first_col(self) -> int:
        """First column in the global row."""
        return self.first_element % self.global_row_numel

    def rows_from(self, row: int, count: int) -> Rectangle:
        """The rectangle of ``count`` successive rows, from index ``row`` of this rectangle on."""
        local_start, block = self.local_start + row * self.row_stride, self.local_block + row * self.scales_row_stride
        first_element = self.first_element + row * self.global_row_numel
        return self._replace(local_start=local_start, first_element=first_element, rows=count, local_block=block)

    def columns(self, col: int, stop: int, block_size: int) -> Rectangle:
        """The rectangle narrowed to the columns ``[col, stop)``, which are counted in the parameter's whole rows."""
        skipped, block = col - self.first_col, self.local_block + col // block_size - self.first_col // block_size
        local_start, first_element = self.local_start + skipped, self.first_element + skipped
        return self._replace(local_start=local_start, first_element=first_element, cols=stop - col, local_block=block)

    def split(self, limit: int, block_size: int) -> Iterator[Rectangle]:
        """Splits the rectangle into parts of limited size, in order: groups of rows, or groups of blocks of one row.

        A part has at most ``limit`` elements, unless it is a single block.
        """
        if self.rows * self.cols <= limit:
            yield self
            return
        if self.cols <= limit:
            rows_per_part = limit // self.cols
            for row in range(0, self.rows, rows_per_part):
                yield self.rows_from(row, min(rows_per_part, self.rows - row))
            return
        part_cols, end = max(limit // block_size, 1) * block_size, self.first_col + self.cols
        for row in range(self.rows):
            one_row, col = self.rows_from(row, 1), self.first_col
            while col < end:
                stop = min(col // block_size * block_size + part_cols, end)
                # A single row has no gaps between rows: kernels see this by a stride that equals the columns.
                yield one_row.columns(col, stop, block_size)._replace(row_stride=stop - col)
                col = stop

    def split_before(self, starts: Iterable[int]) -> Iterator[Rectangle]:
        """Splits the rectangle, in order, so that a part begins at each of some elements of the local tensor.

        ``starts`` are their indices, ascending; those outside of the rectangle are ignored. If the rectangle has
        several rows, each begins a row of the local tensor.
        """
        rest = self
        for start in starts:
            numel = start - rest.local_start
            is_inside = 0 < numel < (rest.rows - 1) * rest.row_stride + rest.cols
            if not is_inside:
                continue
            if rest.rows == 1:
                yield rest._replace(cols=numel)
                first_element = rest.first_element + numel
                rest = rest._replace(local_start=start, first_element=first_element, cols=rest.cols - numel)
            else:
                rows = -(-numel // rest.row_stride)  # rounded up, as the rectangle may lack its rows' first columns
                yield rest._replace(rows=rows)
                rest = rest.rows_from(rows, rest.rows - rows)
        yield rest

    def separate_cut_blocks(self, grid: BlockGrid) -> Iterator[Rectangle]:
        """Splits the rectangle by columns: one part per run of whole blocks, one per block that other ranks share."""
        size, col, end = grid.block_size, self.first_col, self.first_col + self.cols
        while col < end:
            block_end = min((col // size + 1) * size, grid.row_numel)
            is_whole = col % size == 0 and end >= block_end
            stop = min(end, block_end)
            if is_whole:  # together with all whole blocks that follow
                stop = end if grid.is_boundary(end) else end // size * size
            yield self.columns(col, stop, size)._replace(cut=not is_whole)
            col = stop
