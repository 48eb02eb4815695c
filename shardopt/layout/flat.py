"""Flat shards: a rank holds one range of the flattened parameter, as under FSDP1 and ZeRO.

Such a range begins and ends anywhere: it is a partial row, whole rows and another partial row at most. The block in
which the range begins and the one in which it ends may be cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shardopt.layout.block_grid import BlockGrid
from shardopt.layout.division import Counted, Division, Exchange, Ranks, ranges
from shardopt.layout.partition import WHOLE, Placed, RangePartition, even_steps
from shardopt.layout.rectangle import Rectangle
from shardopt.layout.shard import ASSIGNED, Shard


class _AssignedShard(Shard):
    """A shard that pickles as None, because it refers to process groups, which cannot be pickled."""

    cuts_rows = True
    layout_attribute = ASSIGNED

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> Shard:
        return self


class FlatShard(_AssignedShard):
    """The elements ``[start, end)`` of the flattened parameter, as a 1-D tensor.

    Args:
        global_shape: shape of the whole parameter.
        start: index of the first element that this rank holds.
        end: index after the last element that this rank holds.
        cuts: where in the flattened parameter one rank's range ends and another's begins, ascending.
        exchange: the ranks that hold the ranges; None where this rank holds all.
        division: the same ranks with the range of each; None where this rank holds all.

    Attributes:
        replicas: the ranks that hold the same range; None if no other is known.
    """

    replicas: Ranks | None = None

    def __init__(
        self,
        global_shape: tuple[int, ...],
        start: int,
        end: int,
        cuts: Sequence[int] = (),
        exchange: Exchange | None = None,
        division: Division | None = None,
    ) -> None:
        super().__init__(global_shape, (max(end - start, 0),))
        self.start, self.end = start, max(end, start)
        self.cuts = cuts
        self.exchange = exchange
        self._division = division
        self._equal: tuple[int, int, Ranks] | None = None
        self._partition: Placed | None = None
        self._cut_blocks: dict[int, list[int]] = {}

    @classmethod
    def equal(cls, global_shape: tuple[int, ...], first: int, size: int, ranks: Ranks) -> FlatShard:
        """This rank's shard, where several parameters are flattened into one tensor and each rank has an equal range.

        Args:
            global_shape: shape of the whole parameter.
            first: offset of the parameter in the flattened tensor.
            size: elements of the flattened tensor per rank.
            ranks: the ranks.
        """
        numbers, numel = ranks.numbers, math.prod(global_shape)
        start, end = (min(max((ranks.rank + i) * size - first, 0), numel) for i in range(2))
        cuts = range((first // size + 1) * size - first, numel, size) if size else ()
        shard = cls(global_shape, start, end, cuts, ranks)
        shard._equal = first, size, ranks
        stride = even_steps(numbers)
        if stride is not None and size:
            rule = RangePartition(len(numbers), stride, first, size, len(global_shape))
            shard._partition = Placed(rule, ranks.rank * stride)
        return shard

    @property
    def partition(self) -> Placed | None:
        return WHOLE if self._partition is None and self.holds_all else self._partition

    def scales_partition(self, grid: BlockGrid) -> Placed | None:
        placed = self.partition
        if placed is None or not isinstance(placed.partition, RangePartition):
            return placed
        of_blocks = placed.partition._replace(dims=2, block=(grid.row_numel, grid.block_size))
        return Placed(of_blocks, placed.offset)

    @property
    def holds_all(self) -> bool:
        """Whether no other rank holds any of the parameter's elements."""
        return self.exchange is None and self.numel == math.prod(self.global_shape)

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return self.end - self.start

    def index_of(self, element: int) -> int:
        return self.start + element

    @property
    def is_range(self) -> bool:
        return True

    @property
    def holders(self) -> Exchange | None:
        return self.exchange

    @property
    def row_owners(self) -> Exchange | None:
        return self.exchange

    @property
    def parts(self) -> Exchange | None:
        return self.exchange

    def counted(self) -> Counted | None:
        counted = super().counted()
        if counted is None or self.replicas is None:
            return counted
        copies, own = self.replicas.numbers, self.replicas.numbers[self.replicas.rank]
        reach = frozenset(number + copy - own for number in counted.numbers for copy in copies)
        return counted._replace(before=frozenset(copy for copy in copies if copy < own), reach=reach)

    @property
    def division(self) -> Division | None:
        numel = math.prod(self.global_shape)
        if self._division is None and self._equal is not None:  # made on demand, as a division names every rank
            first, size, ranks = self._equal
            ends = [min(max(rank * size - first, 0), numel) for rank in range(len(ranks.numbers) + 1)]
            self._division = Division(ranks, tuple(ranges(ends)))
        return self._division if self._division is not None or self.numel == numel else super().division

    def rectangles(self, grid: BlockGrid) -> list[Rectangle]:
        width, per_row = grid.row_numel, grid.blocks_per_row
        first_block = self.blocks(grid)[0]
        rectangles: list[Rectangle] = []
        at = self.start
        while at < self.end:
            row, col = divmod(at, width)
            whole_rows = (self.end - at) // width if col == 0 else 0
            rows, cols = (whole_rows, width) if whole_rows else (1, min(self.end - at, width - col))
            block = row * per_row + col // grid.block_size
            rectangles.append(Rectangle(at - self.start, rows, col, cols, cols, width, block - first_block, per_row))
            at += rows * cols
        return rectangles

    def scales_shape(self, grid: BlockGrid) -> tuple[int, ...]:
        first, end = self.blocks(grid)
        return (end - first,)

    def cut_blocks(self, grid: BlockGrid) -> list[int]:
        """The blocks that lie on several ranks, on this rank or not: numbers in the grid, ascending."""
        blocks = self._cut_blocks.get(grid.block_size)
        if blocks is None:
            inside = [cut for cut in self.cuts if not grid.is_boundary(cut % grid.row_numel)]
            blocks = sorted({grid.block_of(cut) for cut in inside})
            self._cut_blocks[grid.block_size] = blocks
        return blocks

    def first_written_block(self, grid: BlockGrid) -> int:
        """The first block whose first element is on this rank: the holder of a cut block's first element writes it."""
        first = self.blocks(grid)[0]
        return first if self.start == self.end or grid.first_element(first) == self.start else first + 1

    def blocks(self, grid: BlockGrid) -> tuple[int, int]:
        """The blocks of which this rank holds elements: their numbers in the grid are ``[first, end)``."""
        if self.start == self.end:
            return 0, 0
        return grid.block_of(self.start), grid.block_of(self.end - 1) + 1


class Segment(NamedTuple):
    """The part of one parameter that a flat buffer holds.

    Attributes:
        name: the parameter's fully qualified name.
        number: the parameter's number among those of the model.
        shard: the range of its elements.
        offset: index in the buffer of the range's first element.
    """

    name: str
    number: int
    shard: FlatShard
    offset: int

    @classmethod
    def within(cls, name: str, number: int, shard: FlatShard, first: int, begin: int) -> Segment:
        """The segment of a parameter at offset ``first`` of the flattened tensor; the buffer begins at ``begin``."""
        return cls(name, number, shard, first + shard.start - begin if shard.numel else 0)

    def of(self, buffer: Tensor) -> Tensor:
        """The segment's elements in a tensor laid out like the buffer: a view."""
        return buffer[self.offset : self.offset + self.shard.local_shape[0]]


class FlatBuffer(_AssignedShard):
    """A 1-D tensor made of ranges of several parameters, and of padding, which no optimizer looks at.

    Args:
        numel: the buffer's length on this rank.
        segments: all parameters that the buffer is made of on any rank, in the same order on all ranks.
        known_params: number of parameters that the segments' numbers count, if the model may have more; else None.
        aliases: the other names of shared parameters, by the names in their segments.
    """

    def __init__(
        self,
        numel: int,
        segments: Sequence[Segment],
        known_params: int | None = None,
        aliases: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__((numel,), (numel,))
        self.segments = tuple(segments)
        self.known_params = known_params
        self.aliases = dict(aliases or {})

    @property
    def holders(self) -> Exchange | None:
        return self.segments[0].shard.holders if self.segments else None
