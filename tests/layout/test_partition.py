"""Partitions against an array of owners: parts make up a tensor, and a rectangle's holders are its elements' owners."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardDim
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter

from ranks.layouts import Shape
from shardopt.checkpoint.rectangles import holders_of
from shardopt.layout import (
    FlatShard,
    PlacedPartition,
    Shard,
    assign,
    assigned,
    shard_of,
)
from shardopt.layout.partition import Cut, GridPartition, Partition, RangePartition
from shardopt.layout.shard import assign_later
from shardopt.sharding.dtensor import DTensorShard

NOBODY = -1


@st.composite
def grids(draw: st.DrawFn) -> tuple[Shape, Partition, int]:
    """Uneven cuts, one after another, of one dimension too, into more parts than indices, over ranks in any order."""
    shape = tuple(draw(st.lists(st.integers(0, 11), max_size=3)))
    ways = draw(st.lists(st.integers(2, 4), max_size=3)) if shape else []
    strides, ranks = {}, 1
    for index in draw(st.permutations(range(len(ways)))):
        strides[index], ranks = ranks, ranks * ways[index]
    dims = [draw(st.integers(0, len(shape) - 1)) for _ in ways]
    return shape, GridPartition(tuple(map(Cut, dims, ways, map(strides.get, range(len(ways)))))), ranks  # type: ignore[arg-type]


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[Shape, Partition, int]:
    """A parameter's elements, its blocks' scales or its step count, with or without dimensions that are never cut."""
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    first, size, stride = draw(st.integers(0, 120)), draw(st.integers(5, 60)), draw(st.integers(1, 2))
    ways = -(-(first + math.prod(shape)) // size) + draw(st.integers(0, 2))
    rule = RangePartition(ways, stride, first, size, len(shape))
    if draw(st.booleans()):
        width, block_size = math.prod(shape[1:]), draw(st.integers(2, 9))
        shape, rule = (shape[0], -(-width // block_size)), rule._replace(dims=2, block=(width, block_size))
    elif draw(st.booleans()):
        shape, rule = (), rule._replace(dims=0)
    return (*shape, *draw(st.sampled_from([(), (2,)]))), rule, ways * stride


def owners_of(shape: Shape, partition: Partition, offsets: int) -> torch.Tensor:
    """The offset of the rank that holds each element; no element is held by two."""
    owners = torch.full(shape, NOBODY)
    for offset in range(offsets):
        for low, extents in partition.parts(shape, offset):
            assert 0 not in extents
            inside = tuple(slice(a, a + n) for a, n in zip(low, extents, strict=True))
            assert (owners[inside] == NOBODY).all(), f"{owners[inside]} and {offset}"
            owners[inside] = offset
    return owners


@settings(deadline=None, max_examples=60)
@given(drawn=st.one_of(grids(), flat_ranges()), data=st.data())
def test_every_element_has_one_owner(drawn: tuple[Shape, Partition, int], data: st.DataObject) -> None:
    shape, partition, ranks = drawn
    owners = owners_of(shape, partition, ranks + 2)
    assert (owners != NOBODY).all()
    if 0 in shape:
        return
    cut = partition.dims if isinstance(partition, RangePartition) else len(shape)  # the dimensions behind are not cut
    for _ in range(5):
        low = [data.draw(st.integers(0, size - 1)) if dim < cut else 0 for dim, size in enumerate(shape)]
        high = [data.draw(st.integers(low[dim] + 1, n)) if dim < cut else n for dim, n in enumerate(shape)]
        part = tuple(low), tuple(b - a for a, b in zip(low, high, strict=True))
        inside = owners[tuple(map(slice, low, high))]
        assert holders_of(partition, shape, part) == inside.unique().tolist()


class _Ranks:
    """Ranks of which this is one, with these numbers among all."""

    def __init__(self, rank: int, numbers: tuple[int, ...]) -> None:
        self.rank, self.global_ranks = rank, numbers


@pytest.mark.parametrize(("numbers", "stride"), [((0, 3), 3), ((0, 3, 4), None), ((2, 1), None), ((0, 0), None)])
def test_only_ranks_at_equal_distances_follow_a_rule(numbers: tuple[int, ...], stride: int | None) -> None:
    shard = FlatShard((13, 10), 0, 65, _Ranks(1, numbers))  # type: ignore[arg-type]
    assert shard.placed_partition == (stride and PlacedPartition(RangePartition(2, stride, 0, 65, 2), stride))


class _Mesh:
    """A mesh of ranks from 5 on, as seen from one of them."""

    device_type = "cpu"

    def __init__(self, shape: Shape, coordinate: Shape) -> None:
        self.mesh = torch.arange(5, 5 + math.prod(shape)).reshape(shape)
        self.shape, self.ndim, self._coordinate = shape, len(shape), list(coordinate)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def get_coordinate(self) -> list[int]:
        return self._coordinate


def _partitions_of(shape: Shape, mesh: Shape, placements: tuple[Any, ...]) -> list[bool]:
    """For each rank, whether there is a partition; each is compared with the indices that the rank holds."""
    actual = []
    for coordinate in itertools.product(*map(range, mesh)):
        shard = DTensorShard(shape, _Mesh(mesh, coordinate), placements)  # type: ignore[arg-type]
        placed = shard.placed_partition
        actual.append(placed is not None)
        if placed is not None:
            held = tuple(start for start, _ in shard.indices), shard.local_shape
            assert placed.partition.parts(shape, placed.rank_offset) == ([] if 0 in shard.local_shape else [held])
    return actual


@pytest.mark.parametrize("shape", [(97, 130), (6, 8), (3, 7, 12), (7,)], ids=str)
@pytest.mark.parametrize("mesh", [(4,), (3, 4), (2, 1, 2)], ids=str)
def test_placements(shape: Shape, mesh: Shape) -> None:
    """All combinations of replicated and sharded dimensions are partitions, uneven ones too."""
    options = [Replicate(), *(ShardDim(dim) for dim in range(len(shape)))]
    for placements in itertools.product(options, repeat=len(mesh)):
        assert all(_partitions_of(shape, mesh, placements))


@pytest.mark.parametrize("rows", [6, 14, 8, 7, 1, 49, 97])
def test_fsdp2_and_tensor_parallel(rows: int) -> None:
    """FSDP2 cuts the parts of tensor parallel, which may differ, into parts that may differ."""
    placements = (_StridedShard(0, split_factor=2), ShardDim(0))
    assert _partitions_of((rows, 5), (3, 2), placements) == [True] * 6
    for coordinate in itertools.product(range(3), range(2)):
        shard = DTensorShard((rows, 5), _Mesh((3, 2), coordinate), placements)  # type: ignore[arg-type]
        part = torch.arange(rows)
        for index, chunks in zip(coordinate[::-1], (2, 3), strict=True):
            part = (*torch.chunk(part, chunks), *(part[:0],) * chunks)[index]
        assert list(range(*shard.indices[0])) == part.tolist()


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((3, 2), (_StridedShard(0, split_factor=3), ShardDim(0))), ((3,), (_StridedShard(0, split_factor=2),))],
)
def test_strided_shards_of_no_later_parts(mesh: Shape, placements: tuple[Any, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"got a parameter with placements .*, expected .* split_factor of [12]"):
        DTensorShard((6, 5), _Mesh(mesh, (0,) * len(mesh)), placements)  # type: ignore[arg-type]


# Shards of parameters -------------------------------------------------------------------------------------------------


def test_a_shard_that_is_assigned_when_it_is_asked_for() -> None:
    params = [torch.zeros(2, 3) for _ in range(2)]
    calls = []

    def read() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise RuntimeError("not yet")
        if len(calls) > 2:
            for param in params:
                assign(param, Shard((4, 3)))

    assign(params[0], Shard((9, 3)))
    assign_later(params, read)
    assert calls == []
    with pytest.raises(RuntimeError, match="not yet"):
        shard_of(params[0])
    assert assigned(params[0]) is None
    assert [shard_of(param).global_shape for param in params] == [(4, 3), (4, 3)]
    assign(params[1], Shard((5, 3)))
    assert shard_of(params[1]).global_shape == (5, 3)
    assert calls == [0, 1, 2]


def test_a_parameter_is_pickled_without_its_shard() -> None:
    """Frameworks put parameters into their checkpoints; a shard knows of process groups, which cannot be pickled."""
    param = Parameter(torch.arange(6.0))
    ranks = _Ranks(0, (0, 1))
    ranks.lock = threading.Lock()  # type: ignore[attr-defined]
    assign(param, FlatShard((2, 6), 0, 6, ranks))  # type: ignore[arg-type]
    assert assigned(pickle.loads(pickle.dumps(param))) is None
    assert assigned(copy.deepcopy(param)) in (None, assigned(param))
    assign_later([param], threading.Lock().acquire)
    assert assigned(pickle.loads(pickle.dumps(param))) is None
