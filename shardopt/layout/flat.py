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
from shardopt.layout.partition import UNCUT, Partition, Range, RangePartition, rectangles_of_range
from shardopt.layout.rank_group import HoldersForSums, RankGroup
from shardopt.layout.shard import ASSIGNED, Shard


class FlatRange(Shard):
    """The elements ``[start, end)`` of a flattened tensor: of a parameter (:class:`FlatShard`) or its scales.

    ``saved_from`` is the index of the first element that this rank saves to a checkpoint.
    """

    layout_attribute = ASSIGNED

    def __init__(
        self, shape: tuple[int, ...], elements: Range, partition: Partition, rank: int, ranks: RankGroup | None
    ) -> None:
        self.start, self.end = elements
        self.numel = self.end - self.start
        # The local shape, rows and columns are of the range, which is 1-D whatever the tensor's shape.
        super().__init__((self.numel,), rank_offset=rank, ranks=ranks)
        self.global_shape, self.partition, self.cuts_rows = tuple(shape), partition, True
        self.first_element = self.saved_from = self.start

    def part(self, whole: Tensor) -> Tensor:
        trailing = whole.shape[len(self.global_shape) :]
        return whole.reshape(math.prod(self.global_shape), *trailing)[self.start : self.end]


class FlatShard(FlatRange):
    """This rank's part of a parameter that was flattened, alone or behind others, and cut into a range per rank.

    Args:
        global_shape: shape of the whole parameter.
        first: offset of the parameter in the flattened tensor.
        size: elements of the flattened tensor per rank.
        ranks: the ranks in the order of their ranges; None if this rank holds the whole flattened tensor.

    Attributes:
        buffer_offset: index of the first element in this rank's range of the flattened tensor.
        range_starts: indices of the parameter's elements, ascending, at which the next rank's range begins.
        replicas: the ranks that hold copies of this range (HYBRID_SHARD); None if no copies are known.
    """

    replicas: RankGroup | None = None

    def __init__(self, global_shape: tuple[int, ...], first: int, size: int, ranks: RankGroup | None = None) -> None:
        numel = math.prod(global_shape)
        rank, ways = (0, 1) if ranks is None else (ranks.rank, len(ranks.global_ranks))
        ranges = RangePartition(ways, 1, first, size, len(global_shape))
        is_uncut = ranks is None or size == 0  # size 0: the flattened tensor has no elements to cut
        partition = UNCUT if is_uncut else ranges
        super().__init__(global_shape, ranges.elements(rank, numel), partition, rank, ranks)
        self.buffer_offset = self.start + first - rank * size if self.numel else 0
        self.range_starts = range((first // size + 1) * size - first, numel, size) if size else range(0)

    def holders_for_sums(self) -> HoldersForSums | None:
        """See :meth:`Shard.holders_for_sums`; adds the ranks that hold copies (HYBRID_SHARD)."""
        holders = super().holders_for_sums()
        if holders is None or self.replicas is None:
            return holders
        replicas, own = self.replicas.global_ranks, self.replicas.global_rank
        lower_replicas = frozenset(replica for replica in replicas if replica < own)
        # The replicas of every holder are as far from it as this rank's replicas are from this rank.
        known_holders = frozenset(holder + replica - own for holder in holders.members for replica in replicas)
        return holders._replace(lower_replicas=lower_replicas, known_holders=known_holders)

    def rectangles(self, grid: BlockGrid) -> list[Rectangle]:
        row_numel, blocks_per_row, first_block = grid.row_numel, grid.blocks_per_row, self.block_range(grid)[0]
        rectangles = []
        for (row, col), (rows, cols) in rectangles_of_range((grid.rows, row_numel), self.start, self.end):
            element, block = row * row_numel + col, row * blocks_per_row + col // grid.block_size - first_block
            local_start = element - self.start
            rectangles.append(Rectangle(local_start, element, rows, cols, cols, row_numel, block, blocks_per_row))
        return rectangles

    def _make_scales(self, grid: BlockGrid) -> FlatScales:
        return FlatScales(self, grid)

    def cut_blocks(self, grid: BlockGrid) -> list[int]:
        """Grid indices, ascending, of all blocks of the parameter that are cut between ranks, on this rank or not."""
        cuts = [start for start in self.range_starts if not grid.is_boundary(start % grid.row_numel)]
        return sorted(set(map(grid.block_of, cuts)))

    def block_range(self, grid: BlockGrid) -> Range:
        """The grid indices ``[first, end)`` of the blocks of which this rank holds elements."""
        if self.start == self.end:
            return 0, 0
        return grid.block_of(self.start), grid.block_of(self.end - 1) + 1


class FlatScales(FlatRange):
    """The scales of all blocks of which a :class:`FlatShard` has elements: each rank of a cut block holds its scales.

    A cut block's scales are saved by the rank that holds the block's first element.
    """

    def __init__(self, shard: FlatShard, grid: BlockGrid) -> None:
        partition = shard.partition.of_scales(grid)
        shape = (grid.rows, grid.blocks_per_row)
        super().__init__(shape, shard.block_range(grid), partition, shard.rank_offset, shard.ranks)
        begins_in_block = shard.numel > 0 and not grid.is_boundary(shard.start % grid.row_numel)
        self.saved_from = self.start + int(begins_in_block)


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

    ``segments`` are all parameters that it is made of on any rank, in the same order on all ranks.
    """

    layout_attribute = ASSIGNED

    def __init__(self, numel: int, segments: Sequence[Segment]) -> None:
        super().__init__((numel,))
        self.cuts_rows, self.segments = True, tuple(segments)

    @property
    def holders(self) -> RankGroup | None:
        return self.segments[0].shard.holders if self.segments else None  # all segments have the same ranks
