"""Ranges: which indices of a dimension a rank holds, and which elements follow from those of several dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

#: Indices as ``[start, end)``: ascending, no range empty, none adjacent to the next.
Ranges = tuple[tuple[int, int], ...]


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ascending ranges without the empty ones, adjacent ones merged."""
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and start < end and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        elif start < end:
            merged.append((start, end))
    return tuple(merged)


def count(ranges: Ranges) -> int:
    """How many indices there are."""
    return sum(end - start for start, end in ranges)


def chunk(ranges: Ranges, chunks: int, index: int) -> Ranges:
    """The chunk number ``index`` of ``chunks``, as ``torch.chunk`` divides; chunks that it omits are empty here."""
    size = -(-count(ranges) // chunks)
    first, last = index * size, (index + 1) * size
    if len(ranges) == 1:  # by far the most
        ((start, end),) = ranges
        return ((start + first, min(start + last, end)),) if start + first < end else ()
    parts, before = [], 0  # before: indices ahead of the range
    for start, end in ranges:
        parts.append((start + max(first - before, 0), min(start + last - before, end)))
        before += end - start
    return joined(parts)


def strided_chunk(ranges: Ranges, chunks: int, index: int, split_factor: int) -> Ranges:
    """The chunks number ``index`` of ``split_factor`` chunks each, as torch's ``_StridedShard`` divides the indices."""
    if split_factor == 1:
        return chunk(ranges, chunks, index)
    within = (chunk(chunk(ranges, split_factor, part), chunks, index) for part in range(split_factor))
    return joined(itertools.chain.from_iterable(within))


def flattened(shape: Sequence[int], dims: Sequence[Ranges]) -> Ranges:
    """The elements of a flattened tensor whose index in each dimension is among the ranges of ``dims``."""
    elements: Ranges = ((0, 1),)
    for size, ranges in zip(shape, dims, strict=True):
        if ranges == ((0, size),):
            elements = tuple((start * size, end * size) for start, end in elements)
        else:
            indices = itertools.chain.from_iterable(itertools.starmap(range, elements))
            elements = joined((i * size + start, i * size + end) for i in indices for start, end in ranges)
    return elements


def boxes(dims: Sequence[Ranges]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """The rectangles of a tensor whose indices are among the ranges of ``dims``.

    Yields:
        A rectangle's first indices in the tensor, and its slices of the tensor of these indices alone.
    """
    by_dim = []
    for ranges in dims:
        ends = itertools.accumulate(end - start for start, end in ranges)
        by_dim.append([(start, slice(to - (end - start), to)) for (start, end), to in zip(ranges, ends, strict=True)])
    for corner in itertools.product(*by_dim):
        yield tuple(start for start, _ in corner), tuple(within for _, within in corner)
