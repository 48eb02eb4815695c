"""The block grid: where blocks lie follows from the global shape, and a shard's columns divide into their parts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.layout import (
    BlockGrid,
    Rectangle,
    assign,
    assign_later,
    assigned,
    is_quantized,
    register,
    shard,
    shard_of,
)

shapes = st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple)
block_sizes = st.sampled_from([16, 32, 128, 4096])


@settings(deadline=None)
@given(shape=shapes, block_size=block_sizes)
def test_blocks_cover_every_row_and_cross_none(shape: tuple[int, ...], block_size: int) -> None:
    grid = BlockGrid(shape, block_size)
    assert grid.rows * grid.row_numel == math.prod(shape)
    assert (grid.blocks_per_row - 1) * block_size < grid.row_numel <= grid.blocks_per_row * block_size
    assert grid.scales_shape(1) == (shape[0], grid.blocks_per_row)
    assert grid.scales_shape(2) == (shape[0], grid.blocks_per_row, 2)
    boundaries = [col for col in range(grid.row_numel + 1) if grid.is_boundary(col)]
    assert len(boundaries) == grid.blocks_per_row + 1


@pytest.mark.parametrize(
    ("shape", "min_quantized_numel", "expected"),
    [
        ((64, 64), 4096, True),
        ((63, 65), 4096, False),  # 4095 elements
        ((63, 65), 4095, True),
        ((4096,), 4096, False),  # a bias or norm
        ((), 0, False),
        ((1, 4096), 4096, True),
        ((4096, 1), 4096, False),  # rows of one element
        ((1000, 31), 4096, False),
        ((1000, 32), 4096, True),
        ((200, 4, 8), 4096, True),  # a row is everything behind dim 0
        ((200, 4, 7), 4096, False),
        ((2, 32), 0, True),
        ((0, 64), 0, False),
        ((64, 0), 0, False),
    ],
)
def test_what_is_quantized(shape: tuple[int, ...], min_quantized_numel: int, expected: bool) -> None:
    assert is_quantized(shape, min_quantized_numel) is expected


@st.composite
def column_ranges(draw: st.DrawFn) -> tuple[BlockGrid, int, int]:
    """A grid and a range of its columns."""
    row_numel = draw(st.integers(1, 700))
    grid = BlockGrid((draw(st.integers(1, 3)), row_numel), draw(block_sizes))
    first = draw(st.integers(0, row_numel))
    return grid, first, draw(st.integers(0, row_numel - first))


def rectangle_of(grid: BlockGrid, first_col: int, cols: int) -> Rectangle:
    return Rectangle(0, 2, first_col, cols, cols, grid.row_numel, first_col // grid.block_size, grid.blocks_per_row)


@settings(deadline=None)
@given(column_ranges())
def test_divided_bands_tile_the_columns(drawn: tuple[BlockGrid, int, int]) -> None:
    grid, first_col, cols = drawn
    at = 0
    for part in rectangle_of(grid, first_col, cols).divided(grid):
        assert part.first_col - first_col == part.element == at
        assert part.cols > 0
        at += part.cols
    assert at == cols


@settings(deadline=None)
@given(column_ranges())
def test_divided_bands_are_whole_blocks_or_one_cut_block(drawn: tuple[BlockGrid, int, int]) -> None:
    grid, first_col, cols = drawn
    parts = list(rectangle_of(grid, first_col, cols).divided(grid))
    for part in parts:
        begin, end = part.first_col, part.first_col + part.cols
        assert part.block == begin // grid.block_size
        last = (end - 1) // grid.block_size
        if part.cut:
            assert last == part.block
            assert not (grid.is_boundary(begin) and grid.is_boundary(end))
        else:
            assert begin % grid.block_size == 0
            assert grid.is_boundary(end)
    assert sum(part.cut for part in parts) <= 2
    assert sum(not part.cut for part in parts) <= 1


def test_a_plain_tensor_is_its_own_shard() -> None:
    tensor = torch.zeros(5, 7, 3)
    whole = shard_of(tensor)
    grid = BlockGrid((5, 7, 3), 16)
    assert (whole.rows, whole.cols, whole.columns) == (5, 21, ((0, 21),))
    assert whole.global_shape == whole.local_shape == (5, 7, 3)
    assert whole.local(tensor) is tensor
    assert whole.like_parameter(tensor) is tensor
    assert whole.whole(tensor) is tensor
    assert whole.part(tensor) is tensor
    assert whole.local_blocks(grid) == (0, 2, None, 1)
    scalar = shard_of(torch.zeros(()))
    assert (scalar.rows, scalar.cols) == (1, 1)


def test_registered_resolvers_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "_resolvers", [])
    mine, other = torch.zeros(2, 3), torch.zeros(2, 3)
    known = shard.Shard((4, 3), (2, 3))
    register(lambda tensor: known if tensor is mine else None)
    assert shard_of(mine) is known
    assert shard_of(other) is not known


def test_a_shard_that_is_assigned_when_it_is_asked_for() -> None:
    params = [torch.zeros(2, 3) for _ in range(2)]
    calls = []

    def read() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise RuntimeError("not yet")
        if len(calls) > 2:
            for param in params:
                assign(param, shard.Shard((4, 3), (2, 3)))

    assign(params[0], shard.Shard((9, 3), (2, 3)))
    assign_later(params, read)
    assert calls == []
    with pytest.raises(RuntimeError, match="not yet"):
        shard_of(params[0])
    assert assigned(params[0]) is None
    assert [shard_of(param).global_shape for param in params] == [(4, 3), (4, 3)]
    assert calls == [0, 1, 2]
    assign(params[1], shard.Shard((5, 3), (2, 3)))
    assert shard_of(params[1]).global_shape == (5, 3)
    assert calls == [0, 1, 2]
