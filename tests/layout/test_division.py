"""Regions and matrices' parts against sets of elements: what each rank holds, and which of it is in a matrix."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks.layouts import Shape
from shardopt.layout import BlockGrid, Division, FlatShard, Rectangle, Region, Shard, UnknownShardError
from shardopt.layout.division import ranges


class OneRank:
    """A rank of several, which says nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.numbers = rank, tuple(range(size))


def elements(region: Region) -> list[int]:
    """Indices in the flattened parameter, in the order in which the region's elements lie on their rank."""
    return [region.first + row * region.stride + col for row in range(region.rows) for col in range(region.cols)]


def intervals(end: int) -> list[tuple[int, int]]:
    """All intervals ``[a, b)`` within ``[0, end)``, one empty one included."""
    return [(0, 0), *itertools.combinations(range(end + 1), 2)]


def small_rectangles() -> Iterator[tuple[Shape, Region]]:
    """All small matrices with all their parts that are some columns of some rows."""
    for rows, width in itertools.product((1, 2, 4), (1, 3)):
        for (top, bottom), (left, right) in itertools.product(intervals(rows), intervals(width)):
            some, cols = bottom - top, right - left
            yield (rows, width), Region(top * width + left if some * cols else 0, some, cols, width)


@st.composite
def matrices_of(draw: st.DrawFn, rows: int, width: int) -> list[tuple[int, int]]:
    """Where matrices of whole rows begin and end."""
    ends = sorted(draw(st.sets(st.integers(1, rows - 1), max_size=3))) if rows > 1 else []
    return [(a * width, b * width) for a, b in itertools.pairwise([0, *ends, rows])]


def test_rectangles_within_matrices() -> None:
    for (rows, width), region in small_rectangles():
        for first, last in intervals(rows):
            part = region.within(first * width, last * width)
            expected = [element for element in elements(region) if first * width <= element < last * width]
            assert elements(part) == expected, f"{region} within rows {first} to {last}"
            assert part.numel == len(expected)


def test_ranges_within_matrices() -> None:
    for (first, end), (start, stop) in itertools.product(intervals(9), intervals(9)):
        part = Region(first, 1, end - first, end - first).within(start, stop)
        assert elements(part) == [element for element in range(first, end) if start <= element < stop]


@pytest.mark.parametrize("offset", [0, 5])
def test_elements_of_a_whole_matrix(offset: int) -> None:
    """Also where the tensor begins in the midst of its storage, and with another element of the parameter."""
    for (rows, width), region in small_rectangles():
        numbers = torch.arange(-offset, rows * width)[offset:]
        for first, last in intervals(rows):
            start = first * width
            part, whole = region.within(start, last * width), numbers[start : last * width]
            view = part.of(whole, start)
            assert view.shape == (part.rows, part.cols)
            assert view.flatten().tolist() == elements(part)
            assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 50), max_size=5))
def test_ranges_cover_everything_once(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), 50]
    found = list(ranges(ends))
    assert len(found) == len(ends) - 1
    assert [element for region in found for element in elements(region)] == list(range(50))
    assert all(region.rows == 1 for region in found)


def test_ranges_of_ends_that_fall() -> None:
    """A rank whose range would end before it begins has none."""
    assert [region.numel for region in ranges([0, 7, 5, 9])] == [7, 0, 4]


@settings(deadline=None)
@given(first=st.integers(0, 100), size=st.integers(1, 100))
def test_flat_shards_know_each_other(first: int, size: int) -> None:
    """All ranks have the same regions, and each one's own is the range that it holds."""
    count = -(-(first + 60) // size)
    shards = [FlatShard.equal((6, 10), first, size, OneRank(rank, count)) for rank in range(count)]
    regions = {shard.division.regions for shard in shards}
    assert len(regions) == 1
    for rank, (shard, region) in enumerate(zip(shards, regions.pop(), strict=True)):
        assert elements(region) == list(range(shard.start, shard.end))
        assert shard.division.ranks.rank == rank


def test_who_holds_all_of_it() -> None:
    assert Shard((6, 10), (6, 10)).division is None
    assert FlatShard((6, 10), 0, 60).division is None
    whole, parts = Region(0, 6, 10, 10), (Region(0, 3, 10, 10), Region(30, 3, 10, 10))
    assert Division(OneRank(), (whole, whole)).is_copied
    assert not Division(OneRank(), parts).is_copied


def test_parts_that_nobody_knows_of() -> None:
    for shard in (Shard((6, 10), (3, 10)), Shard((6, 10), (6, 5)), FlatShard((6, 10), 0, 59)):
        with pytest.raises(UnknownShardError, match=r"division to say which ranks hold the rest"):
            _ = shard.division


# Rectangles of the kernels' table -------------------------------------------------------------------------------------


def local_elements(rectangle: Rectangle) -> list[int]:
    """Indices in the local tensor."""
    rows, cols = range(rectangle.rows), range(rectangle.cols)
    return [rectangle.element + row * rectangle.row_stride + col for row in rows for col in cols]


def described(rectangle: Rectangle, block_size: int) -> list[tuple[int, int, int]]:
    """Of every element its index in the local tensor, its column in the global row, and its block's index."""
    first = rectangle.first_col // block_size
    return [
        (
            rectangle.element + row * rectangle.row_stride + col,
            rectangle.first_col + col,
            rectangle.block + row * rectangle.blocks_stride + (rectangle.first_col + col) // block_size - first,
        )
        for row in range(rectangle.rows)
        for col in range(rectangle.cols)
    ]


@st.composite
def whole_rows(draw: st.DrawFn) -> tuple[Rectangle, list[int]]:
    """A rectangle of rows, and elements that begin one, some of which lie elsewhere."""
    cols, rows, per_row = draw(st.integers(1, 40)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    element = cols * draw(st.integers(0, 3))
    rectangle = Rectangle(element, rows, draw(st.integers(0, 40)), cols, cols, 99, draw(st.integers(0, 9)), per_row)
    begins = draw(st.sets(st.integers(0, 10)))
    return rectangle, [cols * row for row in sorted(begins)]


@st.composite
def one_row(draw: st.DrawFn) -> tuple[Rectangle, list[int]]:
    """A part of a row, and any elements."""
    cols = draw(st.integers(1, 60))
    rectangle = Rectangle(draw(st.integers(0, 30)), 1, draw(st.integers(0, 50)), cols, cols, 99, 4, 7)
    return rectangle, sorted(draw(st.sets(st.integers(0, 100))))


@settings(deadline=None)
@given(case=whole_rows())
def test_rows_ended(case: tuple[Rectangle, list[int]]) -> None:
    _check_ended(*case, block_size=16)


@settings(deadline=None)
@given(case=one_row())
def test_a_row_ended_at_a_block(case: tuple[Rectangle, list[int]]) -> None:
    """Where a part begins in the midst of a block, its block's index is not asked for before it is divided."""
    rectangle, ends = case
    parts = list(rectangle.ended(ends))
    assert [element for part in parts for element in local_elements(part)] == local_elements(rectangle)
    _check_intervals(parts, ends)
    assert [part.first_col - part.element for part in parts] == [rectangle.first_col - rectangle.element] * len(parts)


def _check_ended(rectangle: Rectangle, ends: list[int], block_size: int) -> None:
    parts = list(rectangle.ended(ends))
    assert [found for part in parts for found in described(part, block_size)] == described(rectangle, block_size)
    _check_intervals(parts, ends)


def _check_intervals(parts: list[Rectangle], ends: list[int]) -> None:
    """No part reaches from one matrix into the next, and there are no more parts than need be."""
    for part in parts:
        inside = local_elements(part)
        assert inside
        assert not any(inside[0] < end <= inside[-1] for end in ends)
    for _, part in itertools.pairwise(parts):
        assert part.element in ends


@settings(deadline=None)
@given(data=st.data())
def test_flat_shards_ended(data: st.DataObject) -> None:
    """Ranges of a parameter of several matrices: every row of the table has its block, and lies in one matrix."""
    rows, width, block_size = data.draw(st.integers(2, 6)), data.draw(st.integers(32, 90)), 32
    numel = rows * width
    start = data.draw(st.integers(0, numel))
    shard = FlatShard((rows, width), start, data.draw(st.integers(start, numel)), (), None)
    grid = BlockGrid((rows, width), block_size)
    matrices = data.draw(matrices_of(rows, width))
    begins = [max(first - shard.start, 0) for first, _ in matrices[1:]]
    first_block = shard.blocks(grid)[0]
    for whole in shard.rectangles(grid):
        for piece in whole.ended(begins):
            for part in piece.divided(grid):
                first = shard.start + part.element
                assert (
                    len(
                        {
                            i
                            for i, (a, b) in enumerate(matrices)
                            for e in local_elements(part)
                            if a <= shard.start + e < b
                        }
                    )
                    == 1
                )
                assert part.block == grid.block_of(first) - first_block
                assert part.first_col == first % width
