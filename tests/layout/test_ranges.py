"""Ranges of indices: as torch divides dimensions, and against lists of all indices."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.layout import BlockGrid, Shard, boxes
from shardopt.layout.ranges import Positions, Ranges, chunk, count, flattened, joined, strided_chunk

Shape = tuple[int, ...]


def listed(ranges: Ranges) -> list[int]:
    return [index for start, end in ranges for index in range(start, end)]


def is_normal(ranges: Ranges) -> bool:
    """Ascending, none empty, none next to each other."""
    ends = [end for of_one in ranges for end in of_one]
    return ends == sorted(set(ends))


def chunk_of(indices: torch.Tensor, chunks: int, index: int) -> torch.Tensor:
    found = torch.chunk(indices, chunks)
    return found[index] if index < len(found) else indices[:0]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_chunks_of_chunks(data: st.DataObject) -> None:
    """Any sequence of chunks and strided chunks of a dimension."""
    size = data.draw(st.integers(0, 40))
    ranges, indices = joined([(0, size)]), torch.arange(size)
    for _ in range(data.draw(st.integers(1, 3))):
        chunks = data.draw(st.integers(1, 5))
        index = data.draw(st.integers(0, chunks - 1))
        factor = data.draw(st.none() | st.integers(1, 4))
        if factor is None:
            ranges, indices = chunk(ranges, chunks, index), chunk_of(indices, chunks, index)
        else:
            ranges = strided_chunk(ranges, chunks, index, factor)
            indices = torch.cat([chunk_of(chunk_of(indices, factor, i), chunks, index) for i in range(factor)])
        assert listed(ranges) == indices.tolist()
        assert is_normal(ranges)
        assert count(ranges) == len(indices)
    positions = Positions(ranges)
    assert [positions[place] for place in range(len(indices))] == indices.tolist()


@st.composite
def parts(draw: st.DrawFn) -> tuple[Shape, list[Ranges]]:
    """A shape, and some indices of each dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    cuts = [sorted(draw(st.sets(st.integers(0, size)))) for size in shape]
    whole = draw(st.sets(st.integers(0, 3)))
    dims = [
        ((0, size),) if dim in whole else joined(zip(ends[::2], ends[1::2], strict=False))
        for dim, (size, ends) in enumerate(zip(shape, cuts, strict=True))
    ]
    return shape, dims


def elements_of(shape: Shape, dims: list[Ranges]) -> torch.Tensor:
    """The numbers of the elements at these indices, in the part's shape."""
    found = torch.arange(math.prod(shape)).view(shape)
    for dim, ranges in enumerate(dims):
        found = found.index_select(dim, torch.tensor(listed(ranges), dtype=torch.int64))
    return found


@settings(deadline=None)
@given(part=parts())
def test_elements_of_several_dimensions(part: tuple[Shape, list[Ranges]]) -> None:
    shape, dims = part
    numbers = elements_of(shape, dims)
    assert listed(flattened(shape, dims)) == numbers.flatten().tolist()
    assert is_normal(flattened(shape, dims))
    whole, seen = torch.arange(math.prod(shape)).view(shape), torch.zeros(numbers.shape, dtype=torch.int64)
    for begins, inside in boxes(dims):
        extents = numbers[inside].shape
        expected = whole[tuple(slice(a, a + n) for a, n in zip(begins, extents, strict=True))]
        assert torch.equal(numbers[inside], expected)
        seen[inside] += 1
    assert (seen == 1).all()


class Part(Shard):
    """Any indices of each dimension."""

    def __init__(self, shape: Shape, dims: list[Ranges]) -> None:
        super().__init__(shape, tuple(map(count, dims)))
        self.indices = tuple(dims)


@settings(deadline=None)
@given(part=parts(), block_size=st.sampled_from([1, 2, 4, 16]))
def test_rectangles_hold_each_element_once(part: tuple[Shape, list[Ranges]], block_size: int) -> None:
    """And know its place in the parameter, and its block: rows begin where blocks do."""
    shape, dims = part
    shard, grid = Part(shape, dims), BlockGrid(shape, block_size)
    numbers = elements_of(shape, dims).flatten().tolist()
    actual = []
    for rectangle in shard.rectangles(grid):
        first = shard.index_of(rectangle.element)
        for row in range(rectangle.rows):
            for col in range(rectangle.cols):
                local = rectangle.element + row * rectangle.row_stride + col
                assert numbers[local] == shard.index_of(local) == first + row * rectangle.stride + col
                in_row = (rectangle.first_col + col) // block_size - rectangle.first_col // block_size
                block = grid.block_of(numbers[local]) % grid.blocks_per_row
                local_row = local // shard.cols
                expected = local_row * grid.blocks_per_row + block
                assert rectangle.block + row * rectangle.blocks_stride + in_row == expected
                actual.append(local)
    assert sorted(actual) == list(range(len(numbers)))


@pytest.mark.parametrize(("block_size", "expected"), [(128, 1), (100, 6)])
def test_columns_of_whole_blocks_are_one_rectangle(block_size: int, expected: int) -> None:
    """A stack whose dim 2 is whole blocks is a matrix of more rows."""
    shard = Part((4, 6, 256), [((0, 4),), ((0, 6),), ((64, 200),)])
    assert len(shard.rectangles(BlockGrid((4, 6, 256), block_size))) == expected
