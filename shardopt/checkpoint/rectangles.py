"""Axis-aligned boxes ("rectangles") of a tensor: their intersection, who holds them, whether they tile the tensor."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from random import Random

from shardopt.layout.partition import Part, Partition, Range, RangePartition

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
    # Of the parts that the cuts so far make, those that overlap the rectangle: rank offset, and indices by dimension.
    parts: list[tuple[int, dict[int, Range]]] = [(0, {dim: (0, size) for dim, size in enumerate(shape)})]
    for dim, ways, stride in partition.cuts:
        low, high = part[0][dim], part[0][dim] + part[1][dim]
        smaller_parts = []
        for offset, indices in parts:
            start, end = indices[dim]
            length = -(-(end - start) // ways)
            for index in range((max(low, start) - start) // length, (min(high, end) - 1 - start) // length + 1):
                begin = start + index * length
                smaller_parts.append((offset + index * stride, {**indices, dim: (begin, min(begin + length, end))}))
        parts = smaller_parts
    return sorted({offset for offset, _ in parts})


def _range_holders(partition: RangePartition, shape: Sequence[int], part: Part) -> list[int]:
    cut = shape[: partition.dims]
    numel = math.prod(cut)
    first = last = 0  # the rectangle's first and last elements in the flattened dimensions
    for size, low, extent in zip(cut, *part, strict=False):
        first, last = first * size + low, last * size + low + extent - 1

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
