"""Axis-aligned boxes ("rectangles") of a tensor: their intersection, who holds them, whether they tile the tensor."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from shardopt.layout.partition import Cut, Part, Partition, RangePartition

_PRIME = 2**61 - 1
_random = Random()  # not the global generator, whose state is the user's


def slices(offsets: Sequence[int], extents: Sequence[int]) -> tuple[slice, ...]:
    """Slices that index a rectangle of a tensor: ``tensor[slices(offsets, extents)]`` is a view of it."""
    return tuple(slice(offset, offset + extent) for offset, extent in zip(offsets, extents, strict=True))


def common_part(one: Part, other: Part) -> Part | None:
    """The intersection of two rectangles; None if it is empty."""
    corners = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(*one, *other, strict=True)]
    if any(low >= high for low, high in corners):
        return None
    return tuple(low for low, _ in corners), tuple(high - low for low, high in corners)


def relative_to(part: Part, offsets: Sequence[int]) -> Part:
    """A rectangle with its offsets made relative to ``offsets``, where an enclosing rectangle begins."""
    return tuple(a - b for a, b in zip(part[0], offsets, strict=True)), part[1]


def holders_of(partition: Partition, shape: Sequence[int], part: Part) -> list[int]:
    """The rank offsets, ascending, of the holders of elements of a non-empty rectangle: of copies, the least offset."""
    if isinstance(partition, RangePartition):
        return _range_holders(partition, shape, part)
    offsets_by_dim = []
    for dim, (low, extent) in enumerate(zip(*part, strict=True)):
        cuts = [cut for cut in partition.cuts if cut.dim == dim]
        offsets_by_dim.append(_holders_along(cuts, shape[dim], low, low + extent))
    return sorted({sum(offsets) for offsets in product(*offsets_by_dim)})


def _holders_along(cuts: Sequence[Cut], extent: int, low: int, high: int) -> Iterator[int]:
    """The holders of the indices ``[low, high)`` of a dimension. Each cut cuts the parts that the one before makes."""
    if not cuts:
        yield 0
        return
    length = -(-extent // cuts[0].ways)
    for index in range(low // length, (high - 1) // length + 1):
        begin = index * length
        part = min(length, extent - begin)
        for rest in _holders_along(cuts[1:], part, max(low - begin, 0), min(high - begin, part)):
            yield index * cuts[0].stride + rest


def _range_holders(partition: RangePartition, shape: Sequence[int], part: Part) -> list[int]:
    dims = partition.dims
    cut, low, extents = tuple(shape[:dims]), part[0][:dims], part[1][:dims]
    strides, numel = [math.prod(cut[dim + 1 :]) for dim in range(dims)], math.prod(cut)
    first = sum(start * stride for start, stride in zip(low, strides, strict=True))
    last = first + sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))

    def range_with(element: int) -> int:
        return bisect_right(range(partition.ways), element, key=lambda index: partition.elements(index, numel)[0]) - 1

    offsets = [index * partition.stride for index in range(range_with(first), range_with(last) + 1)]
    # A short range may hold elements between two rows of the rectangle only, or lie within one block.
    return [offset for offset in offsets if any(common_part(part, x) for x in partition.parts(shape, offset))]


def fills(shape: Sequence[int], rectangles: Sequence[Part]) -> bool:
    """Whether rectangles tile a tensor: each element is in exactly one of them. Takes linear time.

    In each dimension, each index at which a rectangle begins or ends gets a random number; the length of a side is its
    end's number minus its beginning's. Modulo a prime, the volumes of tiles add up to the tensor's volume; those of
    other rectangles do so with a probability of at most the number of dimensions divided by 2**61.

    Args:
        shape: the shape of the tensor, of numbers below 2**63.
        rectangles: the rectangles, in any order. Empty rectangles must lie within the tensor, too.
    """
    for offsets, extents in rectangles:
        if not len(offsets) == len(extents) == len(shape):
            return False
        if any(o < 0 or e < 0 or o + e > s for o, e, s in zip(offsets, extents, shape, strict=True)):
            return False
    if sum(math.prod(extents) for _, extents in rectangles) != math.prod(shape):
        return False
    if len(rectangles) < 2:
        return True
    random_numbers = [defaultdict[int, int](lambda: _random.randrange(_PRIME)) for _ in shape]

    def volume(offsets: Sequence[int], extents: Sequence[int]) -> int:
        sides = zip(random_numbers, offsets, extents, strict=True)
        return math.prod(number_at[start + extent] - number_at[start] for number_at, start, extent in sides)

    return (sum(volume(*each) for each in rectangles) - volume([0] * len(shape), shape)) % _PRIME == 0
