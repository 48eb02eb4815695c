"""Rectangles of a tensor: what two have in common, and whether several fill the tensor."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from random import Random

from shardopt.layout.partition import Part

#: Offsets and extents of a rectangle, one number each per dimension.
Rectangle = tuple[Sequence[int], Sequence[int]]

_PRIME = 2**61 - 1
_random = Random()  # not the global one, whose numbers are the user's


def slices(offsets: Sequence[int], extents: Sequence[int]) -> tuple[slice, ...]:
    """The index of a rectangle in a tensor."""
    return tuple(slice(offset, offset + extent) for offset, extent in zip(offsets, extents, strict=True))


def common_part(one: Part, other: Part) -> Part | None:
    """The rectangle that two rectangles have in common; None if there is none."""
    corners = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(*one, *other, strict=True)]
    if any(low >= high for low, high in corners):
        return None
    return tuple(low for low, _ in corners), tuple(high - low for low, high in corners)


def inside(part: Part, offsets: Sequence[int]) -> Part:
    """A rectangle, counted from the beginning of one that begins at these offsets."""
    return tuple(a - b for a, b in zip(part[0], offsets, strict=True)), part[1]


def fills(shape: Sequence[int], rectangles: Sequence[Rectangle]) -> bool:
    """Whether rectangles cover each element of a tensor exactly once.

    Each index at which a rectangle begins or ends gets a random number, and a side is as long as its end's number minus
    its beginning's. Modulo a prime the rectangles' volumes add up to the tensor's if they cover it; if they do not,
    with a probability of at most the number of dimensions divided by 2**61.

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
    numbers = [defaultdict[int, int](lambda: _random.randrange(_PRIME)) for _ in shape]

    def volume(offsets: Sequence[int], extents: Sequence[int]) -> int:
        sides = zip(numbers, offsets, extents, strict=True)
        return math.prod(at[start + extent] - at[start] for at, start, extent in sides)

    return (sum(volume(*each) for each in rectangles) - volume([0] * len(shape), shape)) % _PRIME == 0
