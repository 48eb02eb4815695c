"""The block grid: where the quantization blocks of a parameter lie, from its global shape alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Rows shorter than this are not worth a scale.
MIN_ROW_NUMEL = 32


def is_quantized(global_shape: tuple[int, ...], min_quantized_numel: int) -> bool:
    """Whether a parameter's state is quantized: a matter of its global shape, never of the shard.

    Biases, norms and small parameters keep float32 state.
    """
    numel = math.prod(global_shape)
    if len(global_shape) < 2 or numel < max(min_quantized_numel, 1):
        return False
    return numel // global_shape[0] >= MIN_ROW_NUMEL


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of a parameter.

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
        """Whether no block has elements on both sides of the column ``col`` of a row."""
        return col % self.block_size == 0 or col == self.row_numel

    def block_of(self, element: int) -> int:
        """The number of the block that an element of the flattened parameter is in; blocks are counted row by row."""
        row, col = divmod(element, self.row_numel)
        return row * self.blocks_per_row + col // self.block_size
