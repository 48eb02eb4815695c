"""Axis-aligned boxes ("rectangles") of a tensor: their intersection, and whether they tile the tensor."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from random import Random

from shardopt.layout.partition import Part

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
