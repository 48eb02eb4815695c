"""Blocks, rectangles and ranges of indices against lists of all elements: what is where, which ranks share a block."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks.layouts import Shape
from shardopt.layout import BlockGrid, FlatScales, FlatShard, Rectangle, Shard, is_quantized
from shardopt.layout.partition import Cut, GridPartition, Range

shapes = st.one_of(
    st.tuples(st.integers(1, 6), st.integers(1, 150)),
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 300)),
)
block_sizes = st.sampled_from([16, 32, 128])


def block_numbers(shape: Shape, block_size: int) -> list[int]:
    """For every element the number of its block: rows are cut into blocks, which are counted row by row."""
    numbers, number = [], -1
    for _ in range(shape[0]):
        for col in range(math.prod(shape[1:])):
            number += col % block_size == 0
            numbers.append(number)
    return numbers


def local_elements(rectangle: Rectangle) -> list[int]:
    """Indices in the local tensor."""
    rows, cols = range(rectangle.rows), range(rectangle.cols)
    return [rectangle.local_start + row * rectangle.row_stride + col for row in rows for col in cols]


def local_blocks(rectangle: Rectangle, block_size: int) -> list[int]:
    """For every element the index of its block in the local scales."""
    rows, cols = range(rectangle.rows), range(rectangle.first_col, rectangle.first_col + rectangle.cols)
    first = rectangle.local_block - rectangle.first_col // block_size
    return [first + row * rectangle.scales_row_stride + col // block_size for row in rows for col in cols]


# Grids ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "min_quantized_numel", "expected"),
    [
        ((63, 65), 4096, False),  # 4095 elements
        ((63, 65), 4095, True),
        ((4096,), 4096, False),  # a bias or norm
        ((), 0, False),
        ((1, 4096), 4096, True),
        ((1000, 31), 4096, False),
        ((1000, 32), 4096, True),
        ((200, 4, 8), 4096, True),  # a row is everything behind dim 0
        ((0, 64), 0, False),
        ((64, 0), 0, False),
    ],
)
def test_what_is_quantized(shape: Shape, min_quantized_numel: int, expected: bool) -> None:
    assert is_quantized(shape, min_quantized_numel) is expected


@settings(deadline=None)
@given(shape=shapes, block_size=block_sizes)
def test_grid_counts_blocks_as_they_lie(shape: Shape, block_size: int) -> None:
    grid, numbers = BlockGrid(shape, block_size), block_numbers(shape, block_size)
    assert [grid.block_of(element) for element in range(len(numbers))] == numbers
    assert Shard(shape).scales(grid).global_shape == (shape[0], (numbers[-1] + 1) // shape[0])
    row = [-1, *numbers[: grid.row_numel], -1]
    assert [grid.is_boundary(col) for col in range(grid.row_numel + 1)] == [a != b for a, b in itertools.pairwise(row)]


# Indices of each dimension --------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_chunks_of_chunks(data: st.DataObject) -> None:
    """Any sequence of cuts of a dimension, as torch divides it."""
    size = data.draw(st.integers(0, 40))
    indices, cuts, offset = torch.arange(size), [], 0
    for _ in range(data.draw(st.integers(1, 3))):
        chunks = data.draw(st.integers(1, 5))
        index, stride = data.draw(st.integers(0, chunks - 1)), math.prod(cut.ways for cut in cuts)
        cuts.append(Cut(0, chunks, stride))
        offset += index * stride
        found = torch.chunk(indices, chunks)
        indices = found[index] if index < len(found) else indices[:0]
        ((start, end),) = GridPartition(tuple(cuts)).indices((size,), offset)
        assert list(range(start, end)) == indices.tolist()


@st.composite
def parts_of_shapes(draw: st.DrawFn) -> tuple[Shape, list[Range]]:
    """A shape, and some indices of each dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    whole = draw(st.sets(st.integers(0, 3)))
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return shape, [(0, n) if dim in whole else (a, b) for dim, (n, (a, b)) in enumerate(zip(shape, ends, strict=True))]


class Listed(NamedTuple):
    """A cut by which this rank holds any indices of the first dimensions."""

    dims: tuple[Range, ...]
    cuts: tuple[Cut, ...] = (Cut(2, 1, 1),)

    def indices(self, shape: Shape, offset: int) -> tuple[Range, ...]:
        return (*self.dims, *((0, size) for size in shape[len(self.dims) :]))

    def of_scales(self, grid: BlockGrid) -> Listed:
        return Listed(self.dims[:1])


@settings(deadline=None)
@given(part=parts_of_shapes(), block_size=st.sampled_from([1, 2, 4, 16]))
def test_rectangles_hold_each_element_once(part: tuple[Shape, list[Range]], block_size: int) -> None:
    """And know its place in the parameter, and its block: rows begin where blocks do."""
    shape, dims = part
    shard, grid = Shard(shape, cast(Any, Listed(tuple(dims)))), BlockGrid(shape, block_size)
    inside = tuple(slice(start, end) for start, end in dims)
    numbers = torch.arange(math.prod(shape)).view(shape)[inside].flatten().tolist()
    blocks = block_numbers(shape, block_size)
    actual = []
    for rectangle in shard.rectangles(grid):
        inside, first = local_elements(rectangle), rectangle.first_element
        places = [
            first + row * rectangle.global_row_numel + col
            for row in range(rectangle.rows)
            for col in range(rectangle.cols)
        ]
        assert [numbers[local] for local in inside] == places
        rows = [local // shard.cols * grid.blocks_per_row for local in inside]
        in_row = [blocks[number] % grid.blocks_per_row for number in places]
        assert local_blocks(rectangle, block_size) == [a + b for a, b in zip(rows, in_row, strict=True)]
        actual += inside
    assert sorted(actual) == list(range(len(numbers)))


# Flat shards ----------------------------------------------------------------------------------------------------------


class Rank(NamedTuple):
    """One of several ranks."""

    rank: int
    global_ranks: tuple[int, ...]


#: A shape, a block size, and the shards of 1 to 5 ranks.
Split = tuple[Shape, int, list[FlatShard]]


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Ranges of a tensor of which the parameter is a part: some may be empty."""
    shape, ranks, first = draw(shapes), draw(st.integers(1, 5)), draw(st.integers(0, 200))
    size = -(-(first + math.prod(shape) + draw(st.integers(0, 60))) // ranks)
    numbers = tuple(range(ranks))
    shards = [FlatShard(shape, first, size, cast(Any, Rank(rank, numbers))) for rank in numbers]
    return shape, draw(block_sizes), shards


@settings(deadline=None)
@given(splits())
def test_cut_blocks_are_those_with_several_owners(drawn: Split) -> None:
    shape, block_size, shards = drawn
    grid, numbers = BlockGrid(shape, block_size), block_numbers(shape, block_size)
    owners: dict[int, set[int]] = {}
    for rank, shard in enumerate(shards):
        for number in numbers[shard.start : shard.end]:
            owners.setdefault(number, set()).add(rank)
    shared = sorted(number for number, ranks in owners.items() if len(ranks) > 1)
    for rank, shard in enumerate(shards):
        assert shard.cut_blocks(grid) == shard.cut_blocks(grid) == shared
        firsts = [number for number in owners if shard.start <= numbers.index(number) < shard.end]
        scales = shard.scales(grid)
        assert isinstance(scales, FlatScales)
        written = list(range(scales.saved_from, scales.end))
        assert written == sorted(firsts), f"rank {rank} is to write the blocks whose first element it holds"
