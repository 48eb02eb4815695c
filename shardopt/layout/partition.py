"""The partition: which part of a tensor each rank holds, as a rule of a few numbers for any number of ranks.

A rank offset is the number of a rank minus the number of the rank that holds the first part: among the ranks of one
group, or among all ranks of the job (:class:`PlacedPartition`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardopt.layout.block_grid import BlockGrid

#: A rectangle of a tensor: the index where it begins and its length, in each dimension.
Part = tuple[tuple[int, ...], tuple[int, ...]]
#: A contiguous range of indices, ``[start, end)``.
Range = tuple[int, int]


class Cut(NamedTuple):
    """One dimension of a tensor, cut into parts of equal length for different ranks.

    Attributes:
        dim: the dimension.
        ways: the number of parts, each of ``ceil(extent / ways)`` indices; the last ones may be shorter or empty.
        stride: the difference between the numbers of the ranks that hold one part and the next.
    """

    dim: int
    ways: int
    stride: int


class GridPartition(NamedTuple):
    """Dimensions of a tensor cut into equal parts, as by a DTensor's placements.

    Attributes:
        cuts: applied one after another: a later cut of a dimension cuts the parts of the earlier one. Without cuts one
            rank holds the whole tensor. Each stride is a multiple of ``ways * stride`` of every cut with a smaller
            stride, as in a mesh without gaps.
    """

    cuts: tuple[Cut, ...] = ()

    @property
    def strides(self) -> tuple[tuple[int, int], ...]:
        """The pair ``(ways, stride)`` of each cut."""
        return tuple((cut.ways, cut.stride) for cut in self.cuts)

    def indices(self, shape: Sequence[int], rank_offset: int) -> tuple[Range, ...]:
        """The range of indices that a rank holds in each dimension: the full range where the dimension is not cut."""
        indices: list[Range] = [(0, size) for size in shape]
        for dim, ways, stride in self.cuts:
            start, end = indices[dim]
            length, index = -(-(end - start) // ways), rank_offset // stride % ways
            indices[dim] = min(start + index * length, end), min(start + (index + 1) * length, end)
        return tuple(indices)

    def parts(self, shape: Sequence[int], rank_offset: int) -> list[Part]:
        """The rectangles of a tensor that a rank holds: one, or none if the rank's part is empty.

        Of the ranks with copies of a part, only the one with the least offset holds it.
        """
        if rank_offset != least_offset(self, rank_offset):
            return []
        indices = self.indices(shape, rank_offset)
        extents = extents_of(indices)
        return [] if 0 in extents else [(tuple(start for start, _ in indices), extents)]

    def of_scales(self, grid: BlockGrid) -> GridPartition:
        """The partition of the matrix of scales, one per block: cut like the parameter, or else along rows only.

        Cut along rows only, each rank holds the scales of all blocks of its rows, including blocks on other ranks.
        """
        return self if self._fits_blocks(grid) else GridPartition(tuple(cut for cut in self.cuts if cut.dim == 0))

    def _fits_blocks(self, grid: BlockGrid) -> bool:
        """Whether no block is cut, and the matrix of scales cut like the parameter gives each rank its own blocks.

        False if a dimension above 1 is cut: a rank's columns are then several ranges, and scales have dimension 1 only.
        """
        if all(cut.dim == 0 for cut in self.cuts):
            return True
        if any(cut.dim > 1 for cut in self.cuts):
            return False
        cols_per_index = math.prod(grid.global_shape[2:])
        offsets = [range(0, cut.ways * cut.stride, cut.stride) for cut in self.cuts if cut.dim == 1]
        for rank_offset in map(sum, itertools.product(*offsets)):  # the ranks that hold parts of the first rows
            cols = [index * cols_per_index for index in self.indices(grid.global_shape, rank_offset)[1]]
            blocks = self.indices((grid.rows, grid.blocks_per_row), rank_offset)[1]
            cuts_block = not all(map(grid.is_boundary, cols))
            has_own_blocks = blocks == tuple(-(-col // grid.block_size) for col in cols)
            if cuts_block or not has_own_blocks:
                return False
        return True


class RangePartition(NamedTuple):
    """A parameter that is flattened, alone or behind other parameters, and cut into equal ranges (FSDP1, ZeRO).

    Also describes the parameter's state: a block's scale is with the block's first element, and the step count with
    the parameter's first element.

    Attributes:
        ways: the number of ranges.
        stride: the difference between the numbers of the ranks that hold one range and the next.
        first: index of the parameter's first element in the flattened tensor that is cut.
        size: elements of a range.
        dims: number of leading dimensions that are flattened and cut. 0: the tensor (a step count) is one element.
        block: for scales, the elements of a row of the parameter and of a block; None for other tensors.
    """

    ways: int
    stride: int
    first: int
    size: int
    dims: int
    block: tuple[int, int] | None = None

    @property
    def strides(self) -> tuple[tuple[int, int], ...]:
        """The only pair ``(ways, stride)``."""
        return ((self.ways, self.stride),)

    def parts(self, shape: Sequence[int], rank_offset: int) -> list[Part]:
        """The rectangles that a rank holds of a tensor; see :meth:`GridPartition.parts`."""
        index, remainder = divmod(rank_offset, self.stride)  # a remainder: a rank between two that hold ranges
        if remainder or not 0 <= index < self.ways or 0 in shape:
            return []
        cut, uncut = tuple(shape[: self.dims]), tuple(shape[self.dims :])
        numel = math.prod(cut)
        start, end = self.elements(index, numel)
        if index == self.ways - 1:
            end = numel  # includes the step count of an empty parameter
        zeros = (0,) * len(uncut)
        return [((*low, *zeros), (*extents, *uncut)) for low, extents in rectangles_of_range(cut, start, end)]

    def of_scales(self, grid: BlockGrid) -> RangePartition:
        """The partition of the matrix of scales, one per block, for a parameter's partition."""
        return self._replace(dims=2, block=(grid.row_numel, grid.block_size))

    def elements(self, index: int, numel: int) -> Range:
        """The elements ``[start, end)`` of the flattened tensor (``numel`` in all) that are in the range ``index``."""
        begin = index * self.size - self.first
        return self._elements_before(begin, numel), self._elements_before(begin + self.size, numel)

    def _elements_before(self, position: int, numel: int) -> int:
        """How many of the tensor's elements (of scales: blocks) begin before a position of the flattened parameter."""
        position = max(position, 0)
        if self.block is not None:
            row_numel, block_size = self.block
            row, col = divmod(position, row_numel)
            position = row * -(-row_numel // block_size) + -(-col // block_size)
        return min(position, numel)


Partition = GridPartition | RangePartition


class PlacedPartition(NamedTuple):
    """A tensor's partition over the job's ranks, by global rank number, and this rank's offset in it."""

    partition: Partition
    rank_offset: int


UNCUT = GridPartition()
#: A tensor that this rank holds in full.
WHOLE = PlacedPartition(UNCUT, 0)


def extents_of(indices: Sequence[Range]) -> tuple[int, ...]:
    """The number of indices per dimension: the shape of the part with these indices."""
    return tuple(end - start for start, end in indices)


def contiguous_ranges(shape: Sequence[int], indices: Sequence[Range]) -> list[Range]:
    """A tensor's elements with indices inside ``indices``, as non-empty contiguous ranges of the flattened tensor."""
    elements: list[Range] = [(0, 1)]
    for size, (start, end) in zip(shape, indices, strict=True):
        if end - start == size:
            elements = [(first * size, last * size) for first, last in elements]
        else:
            numbers = itertools.chain.from_iterable(itertools.starmap(range, elements))
            elements = [(number * size + start, number * size + end) for number in numbers]
    return [(first, last) for first, last in elements if first < last]


def least_offset(partition: Partition, rank_offset: int) -> int:
    """The least offset among the ranks with copies of the part that the rank at ``rank_offset`` holds."""
    return sum(rank_offset // stride % ways * stride for ways, stride in partition.strides)


def partition_by_global_rank(partition: Partition, rank_offset: int, ranks: tuple[int, ...]) -> PlacedPartition | None:
    """Converts a partition over the ranks of a group to one over global rank numbers, for checkpoints.

    ``ranks`` are the global rank numbers by index in the group, and ``rank_offset`` is this rank's index. Returns None
    if the ranks are not evenly spaced.
    """
    strides, global_offset = [], 0
    for ways, stride in partition.strides:
        spacing = rank_spacing(ranks, ways, stride)
        if spacing is None:
            return None
        strides.append(spacing)
        global_offset += rank_offset // stride % ways * spacing
    by_stride = sorted((stride, ways) for stride, (ways, _) in zip(strides, partition.strides, strict=True))
    if any(larger % (stride * ways) for (stride, ways), (larger, _) in itertools.pairwise(by_stride)):
        return None  # a mesh with gaps, which GridPartition does not describe
    if isinstance(partition, RangePartition):
        return PlacedPartition(partition._replace(stride=strides[0]), global_offset)
    cuts = [cut._replace(stride=stride) for cut, stride in zip(partition.cuts, strides, strict=True) if cut.ways > 1]
    return PlacedPartition(GridPartition(tuple(cuts)), global_offset)


@lru_cache(maxsize=256)
def rank_spacing(global_ranks: tuple[int, ...], ways: int, stride: int = 1) -> int | None:
    """The difference between global rank numbers of neighbors along a mesh dimension of ``ways`` ranks.

    Neighbors are ``stride`` apart in ``global_ranks``. 1 for a single rank; None unless differences are equal, above 0.
    """
    if ways == 1:
        return 1
    neighbors = zip(global_ranks, global_ranks[stride:], strict=False)
    # The last rank along the dimension has no neighbor behind it.
    spacings = {high - low for index, (low, high) in enumerate(neighbors) if index // stride % ways < ways - 1}
    return min(spacings) if len(spacings) == 1 and min(spacings) > 0 else None


def rectangles_of_range(shape: tuple[int, ...], start: int, end: int) -> Iterator[Part]:
    """The rectangles that make up the range ``[start, end)`` of a flattened tensor of this shape, in order."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row_numel = math.prod(shape[1:])
    row = start // row_numel
    while start < end:
        row_start, rows = row * row_numel, end // row_numel - row
        if start == row_start and rows > 0:
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
        else:  # a part of a row
            rows = 1
            parts = rectangles_of_range(shape[1:], start - row_start, min(end - row_start, row_numel))
            yield from (((row, *low), (1, *extents)) for low, extents in parts)
        row += rows
        start = row * row_numel
