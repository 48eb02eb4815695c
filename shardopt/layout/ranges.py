"""Ranges: which indices of a dimension a rank holds, and which elements follow from those of several dimensions."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

#: Indices as ``[start, end)``: ascending, none empty, none next to each other.
Ranges = tuple[tuple[int, int], ...]


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ascending ranges, with those in one that are next to each other, and without the empty ones."""
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        if found and start < end and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        elif start < end:
            found.append((start, end))
    return tuple(found)


def count(ranges: Ranges) -> int:
    """How many indices there are."""
    return sum(end - start for start, end in ranges)


def chunk(ranges: Ranges, chunks: int, index: int) -> Ranges:
    """One of so many chunks, as ``torch.chunk`` divides the indices; chunks that it leaves out are empty."""
    size = -(-count(ranges) // chunks)
    first, last = index * size, (index + 1) * size
    found, at = [], 0  # at: indices before the range
    for start, end in ranges:
        found.append((start + max(first - at, 0), min(start + last - at, end)))
        at += end - start
    return joined(found)


def strided_chunk(ranges: Ranges, chunks: int, index: int, split_factor: int) -> Ranges:
    """The chunk of this index of each of ``split_factor`` chunks, as torch's ``_StridedShard`` divides the indices."""
    within = (chunk(chunk(ranges, split_factor, part), chunks, index) for part in range(split_factor))
    return joined(itertools.chain.from_iterable(within))


def flattened(shape: Sequence[int], dims: Sequence[Ranges]) -> Ranges:
    """The elements of a flattened tensor whose index in each dimension is among the ranges of ``dims``."""
    found: Ranges = ((0, 1),)
    for size, ranges in zip(shape, dims, strict=True):
        if ranges == ((0, size),):
            found = tuple((start * size, end * size) for start, end in found)
        else:
            indices = itertools.chain.from_iterable(itertools.starmap(range, found))
            found = joined((i * size + start, i * size + end) for i in indices for start, end in ranges)
    return found


def boxes(dims: Sequence[Ranges]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """The rectangles of a tensor whose indices are among the ranges of ``dims``.

    Yields:
        Where a rectangle begins in the tensor, and its elements in the tensor of these indices alone.
    """
    by_dim = []
    for ranges in dims:
        ends = itertools.accumulate(end - start for start, end in ranges)
        by_dim.append([(start, slice(to - (end - start), to)) for (start, end), to in zip(ranges, ends, strict=True)])
    for corner in itertools.product(*by_dim):
        yield tuple(start for start, _ in corner), tuple(within for _, within in corner)


class Positions:
    """Looks up the indices at positions among ranges."""

    def __init__(self, ranges: Ranges) -> None:
        self._starts = [start for start, _ in ranges]
        self._before = list(itertools.accumulate((end - start for start, end in ranges), initial=0))[:-1]

    def __getitem__(self, position: int) -> int:
        place = bisect_right(self._before, position) - 1
        return self._starts[place] + position - self._before[place]
