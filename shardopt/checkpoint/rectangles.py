"""Checks whether rectangles fill a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Offsets and extents of a rectangle, one number each per dimension.
Rectangle = tuple[Sequence[int], Sequence[int]]

_Corners = npt.NDArray[np.int64]

_MOST_TERMS = 1 << 20
_TERMS_PER_RECTANGLE = 16


def fill(shape: Sequence[int], rectangles: Sequence[Rectangle]) -> bool:
    """Whether rectangles cover each element of a tensor exactly once. Takes time of n log n for n rectangles.

    In six or more dimensions, arrangements of many rectangles that are more irregular than any division of a tensor
    among ranks count as not covering it: they would take memory of n times 2^dimensions.

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
    boxes = [rectangle for rectangle in rectangles if 0 not in rectangle[1]]
    if len(boxes) < 2:
        return True
    corners = np.array([*boxes, ((0,) * len(shape), shape)], dtype=np.int64)
    return _add_up(corners[:, 0], corners.sum(axis=1))


def _add_up(low: _Corners, high: _Corners) -> bool:
    """Whether all rectangles but the last one, each taken as 1 within and 0 elsewhere, add up to the last one.

    A sum of functions is zero if and only if its differences along a dimension are. The difference of a rectangle has
    two terms: the rest of the rectangle at the index where it begins, and minus the rest where it ends. So each
    dimension leaves terms of one dimension less, of which those at one index with one rest are added. The terms at the
    tensor's end are left out: they are minus the sum of the others.
    """
    count, dims = low.shape
    # Numbers of each rectangle's rest from a dimension on, equal where rests are.
    rests = np.zeros((dims + 1, count), dtype=np.int64)
    begin, end = np.empty_like(low.T), np.empty_like(low.T)
    ends = np.empty(dims, dtype=np.int64)
    for dim in reversed(range(dims)):
        indices, ranks = np.unique([low[:, dim], high[:, dim]], return_inverse=True)
        begin[dim], end[dim] = ranks.reshape(2, count)
        ends[dim] = len(indices) - 1
        _, pairs = np.unique(begin[dim] * len(indices) + end[dim], return_inverse=True)
        _, rests[dim] = np.unique(pairs * count + rests[dim + 1], return_inverse=True)
    which, place = np.arange(count), np.zeros(count, dtype=np.int64)
    weight = np.ones(count, dtype=np.int64)
    weight[-1] = -1
    for dim in range(dims):
        is_inside = end[dim, which] < ends[dim]
        index = np.concatenate([begin[dim, which], end[dim, which[is_inside]]])
        which = np.concatenate([which, which[is_inside]])
        weight = np.concatenate([weight, -weight[is_inside]])
        _, place = np.unique(np.concatenate([place, place[is_inside]]) * (ends[dim] + 1) + index, return_inverse=True)
        _, first, term = np.unique(place * count + rests[dim + 1, which], return_index=True, return_inverse=True)
        total = np.zeros(len(first), dtype=np.int64)
        np.add.at(total, term, weight)
        first, weight = first[total != 0], total[total != 0]
        if len(first) > max(_MOST_TERMS, _TERMS_PER_RECTANGLE * count):
            return False
        which, place = which[first], place[first]
    return not len(which)
