"""Flat shards: a rank holds one range of the flattened parameter, as under FSDP1 and ZeRO.

The range may begin and end inside rows: at most, it consists of a partial row, whole rows and another partial row.
The first and the last block of the range may continue on other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from shardopt.layout.block_grid import BlockGrid, Rectangle
from shardopt.layout.partition import UNCUT, RangePartition, rectangles_of_range
from shardopt.layout.rank_group import Counted, RankGroup
from shardopt.layout.shard import ASSIGNED, Shard


class FlatShard(Shard):
    """This rank's part of a parameter that was flattened, alone or behind others, and cut into a range per rank.

    Args:
        global_shape: shape of the whole parameter.
        first: offset of the parameter in the flattened tensor.
        size: elements of the flattened tensor per rank; None: this rank holds the whole parameter.
        ranks: the ranks in the order of their ranges; None if this rank holds the whole flattened tensor.
        block: for a matrix of one scale per block, the elements of a row of the parameter and of a block.
        held: the elements ``[start, end)`` of a matrix of scales on this rank, including those of shared blocks.

    Attributes:
        start: index of the first element that this rank holds.
        end: index after the last element that this rank holds.
        saved_from: index of the first element that this rank saves: a shared scale is saved by its block's first rank.
        place: index of the first element in this rank's range of the flattened tensor.
        cuts: indices of the parameter's elements, ascending, at which the next rank's range begins.
        replicas: the ranks that hold copies of this range (HYBRID_SHARD); None if no copies are known.
    """

    layout_attribute = ASSIGNED
    replicas: RankGroup | None = None

    def __init__(
        self,
        global_shape: tuple[int, ...],
        first: int = 0,
        size: int | None = None,
        ranks: RankGroup | None = None,
        *,
        block: tuple[int, int] | None = None,
        held: tuple[int, int] | None = None,
    ) -> None:
        numel = math.prod(global_shape)
        rank, count = (0, 1) if ranks is None else (ranks.rank, len(ranks.numbers))
        self._ranges = RangePartition(count, 1, first, numel if size is None else size, len(global_shape), block)
        self.saved_from, end = self._ranges.ends(rank, numel)
        self.start, self.end = held or (self.saved_from, end)
        self.numel = self.end - self.start
        super().__init__((self.numel,), ranks=ranks)
        self.global_shape, self.offset = tuple(global_shape), rank
        self.rule = UNCUT if ranks is None or not size else self._ranges
        self.cuts_rows, self.range_start = True, self.start
        self.place = self.start + first - rank * self._ranges.size if self.numel else 0
        self.cuts = range((first // size + 1) * size - first, numel, size) if size else range(0)
        self._cut_blocks: dict[int, list[int]] = {}

    def part(self, whole: Tensor) -> Tensor:
        behind = whole.shape[len(self.global_shape) :]
        return whole.reshape(math.prod(self.global_shape), *behind)[self.start : self.end]

    def counted(self) -> Counted | None:
        counted = super().counted()
        if counted is None or self.replicas is None:
            return counted
        copies, own = self.replicas.numbers, self.replicas.numbers[self.replicas.rank]
        reach = frozenset(number + copy - own for number in counted.numbers for copy in copies)
        return counted._replace(before=frozenset(copy for copy in copies if copy < own), reach=reach)

    def rectangles(self, grid: BlockGrid) -> list[Rectangle]:
        width, per_row, first_block = grid.row_numel, grid.blocks_per_row, self.blocks(grid)[0]
        rectangles = []
        for (row, col), (rows, cols) in rectangles_of_range((grid.rows, width), self.start, self.end):
            first, block = row * width + col, row * per_row + col // grid.block_size - first_block
            rectangles.append(Rectangle(first - self.start, first, rows, cols, cols, width, block, per_row))
        return rectangles

    def _matrix_of_blocks(self, grid: BlockGrid) -> FlatShard:
        shape, block = (grid.rows, grid.blocks_per_row), (grid.row_numel, grid.block_size)
        first, size = self._ranges.first, self._ranges.size
        return FlatShard(shape, first, size, self.ranks, block=block, held=self.blocks(grid))

    def cut_blocks(self, grid: BlockGrid) -> list[int]:
        """Grid indices, ascending, of all blocks of the parameter that are cut between ranks, on this rank or not."""
        if grid.block_size not in self._cut_blocks:
            inside = [cut for cut in self.cuts if not grid.is_boundary(cut % grid.row_numel)]
            self._cut_blocks[grid.block_size] = sorted({grid.block_of(cut) for cut in inside})
        return self._cut_blocks[grid.block_size]

    def blocks(self, grid: BlockGrid) -> tuple[int, int]:
        """The grid indices ``[first, end)`` of the blocks of which this rank holds elements."""
        if self.start == self.end:
            return 0, 0
        return grid.block_of(self.start), grid.block_of(self.end - 1) + 1


class Segment(NamedTuple):
    """One parameter in a :class:`FlatBuffer`: its name, its shard, and where in the buffer its elements are.

    Attributes:
        name: the parameter's fully qualified name.
        number: the parameter's index in the model, which seeds stochastic rounding.
        shard: which range of the parameter's elements this rank holds.
        offset: index in the buffer of the range's first element.
        aliases: the other names of a shared parameter.
    """

    name: str
    number: int
    shard: FlatShard
    offset: int
    aliases: tuple[str, ...] = ()


class FlatBuffer(Shard):
    """A 1-D tensor that concatenates ranges of several parameters and padding, which optimizers ignore.

    Args:
        numel: the buffer's length on this rank.
        segments: all parameters that the buffer is made of on any rank, in the same order on all ranks.
    """

    layout_attribute = ASSIGNED

    def __init__(self, numel: int, segments: Sequence[Segment]) -> None:
        super().__init__((numel,))
        self.cuts_rows, self.segments = True, tuple(segments)

    @property
    def holders(self) -> RankGroup | None:
        return self.segments[0].shard.holders if self.segments else None
