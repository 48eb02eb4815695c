"""The partition: which part of a tensor each rank holds, as a rule of a few numbers for any number of ranks.

An offset is the number of a rank minus the number of the rank that holds the first part.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

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

    def indices(self, shape: Sequence[int], offset: int) -> tuple[Range, ...]:
        """The range of indices that a rank holds in each dimension: the full range where the dimension is not cut."""
        indices: list[Range] = [(0, size) for size in shape]
        for dim, ways, stride in self.cuts:
            start, end = indices[dim]
            length, index = -(-(end - start) // ways), offset // stride % ways
            indices[dim] = min(start + index * length, end), min(start + (index + 1) * length, end)
        return tuple(indices)

    def parts(self, shape: Sequence[int], offset: int) -> list[Part]:
        """The rectangles of a tensor that a rank holds: one, or none if the rank's part is empty.

        Args:
            shape: the tensor's shape.
            offset: the rank's offset; of the ranks with copies of a part, only the least offset counts as its holder.
        """
        if offset != least_offset(self, offset):
            return []
        indices = self.indices(shape, offset)
        extents = extents_of(indices)
        return [] if 0 in extents else [(tuple(start for start, _ in indices), extents)]

    @property
    def along_rows(self) -> GridPartition:
        """The partition without the cuts of dimensions other than 0: rows stay whole."""
        return GridPartition(tuple(cut for cut in self.cuts if cut.dim == 0))

    def holders(self, shape: Sequence[int], part: Part) -> list[int]:
        """The offsets, ascending, of the ranks that hold elements of a non-empty rectangle; of copies the least one."""
        along = []
        for dim, (low, extent) in enumerate(zip(*part, strict=True)):
            cuts = [cut for cut in self.cuts if cut.dim == dim]
            along.append(_overlapping(cuts, shape[dim], low, low + extent))
        return sorted({sum(offsets) for offsets in itertools.product(*along)})


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

    def parts(self, shape: Sequence[int], offset: int) -> list[Part]:
        """The rectangles that a rank holds of a tensor; see :meth:`GridPartition.parts`."""
        index, between = divmod(offset, self.stride)
        if between or not 0 <= index < self.ways or 0 in shape:
            return []
        counted, behind = tuple(shape[: self.dims]), tuple(shape[self.dims :])
        numel = math.prod(counted)
        start, end = self.ends(index, numel)
        if index == self.ways - 1:
            end = numel  # includes the step count of an empty parameter
        zeros = (0,) * len(behind)
        return [((*low, *zeros), (*extents, *behind)) for low, extents in rectangles_of_range(counted, start, end)]

    def holders(self, shape: Sequence[int], part: Part) -> list[int]:
        """The offsets of the ranks that hold elements of a rectangle; see :meth:`GridPartition.holders`."""
        counted, low, extents = tuple(shape[: self.dims]), part[0][: self.dims], part[1][: self.dims]
        steps, numel = [math.prod(counted[dim + 1 :]) for dim in range(self.dims)], math.prod(counted)
        first = sum(start * step for start, step in zip(low, steps, strict=True))
        last = first + sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))

        def range_of(element: int) -> int:
            return bisect_right(range(self.ways), element, key=lambda index: self.ends(index, numel)[0]) - 1

        offsets = [index * self.stride for index in range(range_of(first), range_of(last) + 1)]
        # A short range may hold elements between two rows of the rectangle only, or lie within one block.
        return [offset for offset in offsets if any(overlap(part, held) for held in self.parts(shape, offset))]

    def ends(self, index: int, numel: int) -> tuple[int, int]:
        """The elements ``[start, end)`` of the flattened tensor (``numel`` in all) that are in the range ``index``."""
        begin = index * self.size - self.first
        return self._elements_before(begin, numel), self._elements_before(begin + self.size, numel)

    def _elements_before(self, position: int, numel: int) -> int:
        """How many of the tensor's elements are before a position of the flattened parameter."""
        position = max(position, 0)
        if self.block is not None:
            row_numel, block_size = self.block
            row, col = divmod(position, row_numel)
            position = row * -(-row_numel // block_size) + -(-col // block_size)
        return min(position, numel)


Partition = GridPartition | RangePartition


class Placed(NamedTuple):
    """A tensor's partition, and this rank's offset in it."""

    partition: Partition
    offset: int


UNCUT = GridPartition()
#: A tensor that this rank holds in full.
WHOLE = Placed(UNCUT, 0)


def extents_of(indices: Sequence[Range]) -> tuple[int, ...]:
    """The number of indices per dimension: the shape of the part with these indices."""
    return tuple(end - start for start, end in indices)


def flattened(shape: Sequence[int], indices: Sequence[Range]) -> list[Range]:
    """A tensor's elements with indices inside ``indices``, as non-empty contiguous ranges of the flattened tensor."""
    elements: list[Range] = [(0, 1)]
    for size, (start, end) in zip(shape, indices, strict=True):
        if end - start == size:
            elements = [(first * size, last * size) for first, last in elements]
        else:
            numbers = itertools.chain.from_iterable(itertools.starmap(range, elements))
            elements = [(number * size + start, number * size + end) for number in numbers]
    return [(first, last) for first, last in elements if first < last]


def overlap(one: Part, other: Part) -> bool:
    """Whether two rectangles of one tensor have elements in common."""
    corners = zip(*one, *other, strict=True)
    return all(max(a, b) < min(a + extent_a, b + extent_b) for a, extent_a, b, extent_b in corners)


def least_offset(partition: Partition, offset: int) -> int:
    """The least offset among the ranks with copies of the part that the rank at ``offset`` holds."""
    return sum(offset // stride % ways * stride for ways, stride in partition.strides)


def placed_by_number(partition: Partition, offset: int, numbers: tuple[int, ...]) -> Placed | None:
    """Converts a partition over places in a group of ranks to a partition over global rank numbers, for checkpoints.

    Args:
        partition: the partition.
        offset: this rank's place in the group.
        numbers: the global rank numbers, by place in the group.

    Returns:
        The partition and this rank's offset in it; None if the ranks are not evenly spaced.
    """
    strides, at = [], 0
    for ways, stride in partition.strides:
        step = step_between(numbers, ways, stride)
        if step is None:
            return None
        strides.append(step)
        at += offset // stride % ways * step
    ends = sorted((step, ways) for step, (ways, _) in zip(strides, partition.strides, strict=True))
    if any(after % (step * ways) for (step, ways), (after, _) in itertools.pairwise(ends)):
        return None
    if isinstance(partition, RangePartition):
        return Placed(partition._replace(stride=strides[0]), at)
    cuts = zip(partition.cuts, strides, strict=True)
    return Placed(GridPartition(tuple(cut._replace(stride=step) for cut, step in cuts if cut.ways > 1)), at)


@lru_cache(maxsize=256)
def step_between(numbers: tuple[int, ...], ways: int, stride: int = 1) -> int | None:
    """The difference between global rank numbers of neighbors along a mesh dimension of ``ways`` ranks.

    Neighbors are ``stride`` places apart. 1 if the dimension has one rank; None if differences vary or are not above 0.
    """
    places = (place for place in range(len(numbers) - stride) if place // stride % ways < ways - 1)
    found = {numbers[place + stride] - numbers[place] for place in places} if ways > 1 else {1}
    return min(found) if len(found) == 1 and min(found) > 0 else None


def rectangles_of_range(shape: tuple[int, ...], start: int, end: int) -> Iterator[Part]:
    """The rectangles that make up the range ``[start, end)`` of a flattened tensor of this shape, in order."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    row = start // inner
    while start < end:
        begin, rows = row * inner, end // inner - row
        if start == begin and rows > 0:
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
        else:  # a part of a row
            rows = 1
            parts = rectangles_of_range(shape[1:], start - begin, min(end - begin, inner))
            yield from (((row, *offsets), (1, *extents)) for offsets, extents in parts)
        row += rows
        start = row * inner


def _overlapping(cuts: Sequence[Cut], extent: int, low: int, high: int) -> Iterator[int]:
    """The offsets of the ranks that hold the indices ``[low, high)`` of a dimension of this extent."""
    if not cuts:
        yield 0
        return
    length = -(-extent // cuts[0].ways)
    for index in range(low // length, (high - 1) // length + 1):
        begin = index * length
        part = min(length, extent - begin)
        for rest in _overlapping(cuts[1:], part, max(low - begin, 0), min(high - begin, part)):
            yield index * cuts[0].stride + rest
