"""Checks whether rectangles fill a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Offsets and extents of a rectangle, one number each per dimension.
Rectangle = tuple[Sequence[int], Sequence[int]]

_Corners = npt.NDArray[np.int64]


def fill(shape: Sequence[int], rectangles: Sequence[Rectangle]) -> bool:
    """Whether rectangles cover each element of a tensor exactly once.

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
    nonempty = [rectangle for rectangle in rectangles if 0 not in rectangle[1]]
    if len(nonempty) < 2:
        return True
    corners = np.array(nonempty, dtype=np.int64).reshape(len(nonempty), 2, len(shape))
    return _disjoint(corners[:, 0], corners.sum(axis=1), 0)


def _disjoint(low: _Corners, high: _Corners, dim: int) -> bool:
    """Whether no two rectangles share an element, given that any two overlap in all dimensions before ``dim``.

    A sweep along the dimension compares each rectangle with the rectangles that begin at the same index, and with the
    rectangles that begin before that index and end behind it.
    """
    if len(low) < 2:
        return True
    if dim == low.shape[1]:
        return False
    order = np.argsort(low[:, dim], kind="stable")
    low, high = low[order], high[order]
    begin, end = low[:, dim], high[:, dim]
    if (end[:-1] <= begin[1:]).all():
        return True
    begun = order[:0]
    for first, stop in itertools.pairwise([0, *(np.flatnonzero(np.diff(begin)) + 1), len(low)]):
        begun = begun[end[begun] > begin[first]]
        for i in range(first, stop) if len(begun) else ():
            if ((low[i] < high[begun]) & (low[begun] < high[i]))[:, dim + 1 :].all(axis=1).any():
                return False
        if not _disjoint(low[first:stop], high[first:stop], dim + 1):
            return False
        begun = np.append(begun, np.arange(first, stop))
    return True
