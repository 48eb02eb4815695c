"""The partition: which part of a tensor each rank holds, as a rule of a few numbers for any number of ranks.

A partition counts ranks from the one that holds the first part: an offset is the difference between two ranks' numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: Offsets and extents of a rectangle of a tensor, one number each per dimension.
Part = tuple[tuple[int, ...], tuple[int, ...]]


class Cut(NamedTuple):
    """A dimension that is cut into parts of equal length.

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
        cuts: applied one after another: a later cut of a dimension cuts the parts of the earlier one. None: one rank
            holds the whole tensor.
    """

    cuts: tuple[Cut, ...] = ()

    @property
    def strides(self) -> tuple[tuple[int, int], ...]:
        """Ways and stride of each cut."""
        return tuple((cut.ways, cut.stride) for cut in self.cuts)

    def parts(self, shape: Sequence[int], offset: int) -> list[Part]:
        """The rectangles that a rank holds of a tensor, without empty ones.

        Args:
            shape: the tensor's shape.
            offset: the rank's offset; a rank that no part belongs to holds nothing.
        """
        indices = _indices(self.strides, offset)
        if indices is None:
            return []
        low, extents = [0] * len(shape), list(shape)
        for cut, index in zip(self.cuts, indices, strict=True):
            length = -(-extents[cut.dim] // cut.ways)
            low[cut.dim] += index * length
            extents[cut.dim] = min(length, extents[cut.dim] - index * length)
        return [(tuple(low), tuple(extents))] if all(extent > 0 for extent in extents) else []

    def holders(self, shape: Sequence[int], part: Part) -> list[int]:
        """The offsets of the ranks that hold elements of a rectangle that is not empty, ascending."""
        along = []
        for dim, (low, extent) in enumerate(zip(*part, strict=True)):
            cuts = [cut for cut in self.cuts if cut.dim == dim]
            if cuts:
                along.append(list(_overlapping(cuts, shape[dim], low, low + extent)))
        return sorted({sum(offsets) for offsets in itertools.product(*along)})


class RangePartition(NamedTuple):
    """A parameter that is flattened, alone or one after others, and cut into ranges of equal length (FSDP1, ZeRO).

    Also the scales of its blocks, which the holders of the blocks' first elements have, and its step count, which the
    holder of the parameter's first element has.

    Attributes:
        ways: the number of ranges.
        stride: the difference between the numbers of the ranks that hold one range and the next.
        first: index of the parameter's first element in the flattened tensor that is cut.
        size: elements of a range.
        dims: number of leading dimensions that are cut; the others stay whole. 0: the tensor counts as one element.
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
        """Ways and stride."""
        return ((self.ways, self.stride),)

    def parts(self, shape: Sequence[int], offset: int) -> list[Part]:
        """The rectangles that a rank holds of a tensor; see :meth:`GridPartition.parts`."""
        indices = _indices(self.strides, offset)
        if indices is None or 0 in shape:
            return []
        counted, behind = tuple(shape[: self.dims]), tuple(shape[self.dims :])
        numel = math.prod(counted)
        start, end = (self._elements_before((indices[0] + i) * self.size - self.first, numel) for i in range(2))
        if indices[0] == self.ways - 1:
            end = numel  # includes the step count of an empty parameter
        zeros = (0,) * len(behind)
        return [((*low, *zeros), (*extents, *behind)) for low, extents in rectangles_of_range(counted, start, end)]

    def holders(self, shape: Sequence[int], part: Part) -> list[int]:
        """The offsets of the ranks that hold elements of a rectangle; see :meth:`GridPartition.holders`."""
        counted = tuple(shape[: self.dims])
        low, extents = part[0][: self.dims], part[1][: self.dims]
        cut = [dim for dim in range(self.dims) if extents[dim] != counted[dim]]
        inner = cut[-1] if cut else 0
        steps = [math.prod(counted[dim + 1 :]) for dim in range(self.dims)]
        run = extents[inner] * steps[inner] if self.dims else 1
        starts = np.array([sum(a * b for a, b in zip(low, steps, strict=True))], dtype=np.int64)
        for dim in range(inner):
            starts = (starts[:, None] + np.arange(extents[dim], dtype=np.int64) * steps[dim]).reshape(-1)
        change = np.zeros(self.ways + 1, dtype=np.int64)
        np.add.at(change, self._range_of(starts), 1)
        np.add.at(change, self._range_of(starts + run - 1) + 1, -1)
        offsets = [int(index) * self.stride for index in np.flatnonzero(np.cumsum(change)[: self.ways])]
        if self.block is not None and self.size < self.block[1]:  # a range may lie within one block
            return [offset for offset in offsets if any(overlap(part, held) for held in self.parts(shape, offset))]
        return offsets

    def _range_of(self, elements: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The index of the range that each element is in."""
        if self.block is not None:
            row_numel, block_size = self.block
            row, block = np.divmod(elements, -(-row_numel // block_size))
            elements = row * row_numel + block * block_size
        indices: npt.NDArray[np.int64] = np.minimum((elements + self.first) // self.size, self.ways - 1)
        return indices

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


#: A tensor that this rank holds in full.
WHOLE = Placed(GridPartition(), 0)


def overlap(one: Part, other: Part) -> bool:
    """Whether two rectangles of one tensor have elements in common."""
    corners = zip(*one, *other, strict=True)
    return all(max(a, b) < min(a + extent_a, b + extent_b) for a, extent_a, b, extent_b in corners)


@lru_cache(maxsize=256)
def even_steps(numbers: tuple[int, ...]) -> int | None:
    """The difference between each number and the next, 1 for a single number; None if the differences are unequal."""
    stride = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    return stride if stride > 0 and all(b - a == stride for a, b in itertools.pairwise(numbers)) else None


def rectangles_of_range(shape: tuple[int, ...], start: int, end: int) -> Iterator[Part]:
    """The rectangles that make up the range ``[start, end)`` of a flattened tensor of this shape, in order."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, skipped = divmod(start, inner)
    last, rest = divmod(end, inner)
    if first == last:  # within one row
        yield from (((first, *o), (1, *e)) for o, e in rectangles_of_range(shape[1:], skipped, rest))
        return
    if skipped:
        yield from (((first, *o), (1, *e)) for o, e in rectangles_of_range(shape[1:], skipped, inner))
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if rest:
        yield from (((last, *o), (1, *e)) for o, e in rectangles_of_range(shape[1:], 0, rest))


def _indices(strides: Sequence[tuple[int, int]], offset: int) -> list[int] | None:
    """The index of each cut at an offset, for the strides of a mesh; None if no rank has the offset."""
    indices = [0] * len(strides)
    for number in sorted(range(len(strides)), key=lambda number: -strides[number][1]):
        ways, stride = strides[number]
        indices[number], offset = divmod(offset, stride)
        if not 0 <= indices[number] < ways:
            return None
    return indices if offset == 0 else None


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
