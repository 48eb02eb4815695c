"""Partitions: their parts make up a tensor, and the ranks said to hold a rectangle are those whose parts overlap it."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt.checkpoint.rectangles import fill
from shardopt.layout import BlockGrid, FlatShard, boxes
from shardopt.layout.partition import Cut, GridPartition, Part, Partition, RangePartition, even_steps
from shardopt.sharding.dtensor import DTensorShard

RANKS = 24

#: Shapes and cuts: uneven, deeper dimensions, one after another, more parts than indices, ranks in any order.
GRIDS: list[tuple[tuple[int, ...], tuple[Cut, ...]]] = [
    ((), ()),
    ((7, 5), ()),
    ((97, 5), (Cut(0, 4, 1),)),
    ((3, 5), (Cut(0, 4, 1),)),
    ((9, 7, 5), (Cut(2, 3, 2),)),
    ((10, 9), (Cut(0, 3, 4), Cut(1, 4, 1))),
    ((10, 9), (Cut(0, 3, 1), Cut(1, 4, 3))),
    ((29, 3), (Cut(0, 3, 4), Cut(0, 4, 1))),
    ((29, 3), (Cut(0, 4, 1), Cut(0, 3, 4))),
    ((11, 6, 4), (Cut(1, 2, 12), Cut(0, 3, 1), Cut(2, 2, 3))),
    ((0, 5), (Cut(0, 4, 1),)),
]

#: Shapes, and where in a whole the parameter begins, in ranges of which size, over how many ranks.
RANGES = [((13, 10), 0, 33, 4), ((13, 10), 57, 40, 6), ((64,), 5, 7, 12), ((1, 40), 0, 10, 4), ((5, 3, 4), 100, 33, 5)]


def partitions() -> list[tuple[tuple[int, ...], Partition]]:
    found: list[tuple[tuple[int, ...], Partition]] = [(shape, GridPartition(cuts)) for shape, cuts in GRIDS]
    for shape, first, size, ways in RANGES:
        of_elements = RangePartition(ways, 2, first, size, len(shape))
        found += [(shape, of_elements), ((*shape, 3), of_elements), ((), of_elements._replace(dims=0))]
        found.append(((6,), of_elements._replace(dims=0)))
        if len(shape) > 1:
            width = math.prod(shape[1:])
            of_blocks = of_elements._replace(dims=2, block=(width, 4))
            scales = (shape[0], -(-width // 4))
            found += [(scales, of_blocks), ((*scales, 2), of_blocks)]
    return found


def overlap(one: Part, other: Part) -> bool:
    corners = zip(*one, *other, strict=True)
    return all(a < b + extent_b and b < a + extent_a for a, extent_a, b, extent_b in corners)


@pytest.mark.parametrize(("shape", "partition"), partitions(), ids=str)
def test_parts_fill_the_tensor(shape: tuple[int, ...], partition: Partition) -> None:
    parts = [part for offset in range(RANKS) for part in partition.parts(shape, offset)]
    assert fill(shape, parts)
    assert all(0 not in extents for _, extents in parts)


@pytest.mark.parametrize(("shape", "partition"), partitions(), ids=str)
def test_holders_are_those_whose_parts_overlap(shape: tuple[int, ...], partition: Partition) -> None:
    rng = Random(0)
    of_ranks = [partition.parts(shape, offset) for offset in range(RANKS)]
    for _ in range(40 if math.prod(shape) else 0):
        low = tuple(rng.randrange(extent) for extent in shape)
        high = [rng.randint(at + 1, extent) for at, extent in zip(low, shape, strict=True)]
        if isinstance(partition, RangePartition):  # what is behind the counted dimensions is never cut
            low, high = (*low[: partition.dims], *(0 for _ in shape[partition.dims :])), list(shape)
            high[: partition.dims] = [rng.randint(at + 1, n) for at, n in zip(low, shape, strict=True)][
                : partition.dims
            ]
        part = low, tuple(end - at for at, end in zip(low, high, strict=True))
        expected = [offset for offset, parts in enumerate(of_ranks) if any(overlap(part, each) for each in parts)]
        assert partition.holders(shape, part) == expected


class _Ranks:
    """Ranks of which this is one, with these numbers among all."""

    def __init__(self, rank: int, numbers: tuple[int, ...]) -> None:
        self.rank, self.numbers = rank, numbers


@pytest.mark.parametrize(("first", "size"), [(0, 33), (20, 50), (7, 129)])
def test_flat_shards_are_where_their_partition_says(first: int, size: int) -> None:
    """Elements, scales and the first element's rank, counted anew from the shards."""
    shape, ways = (13, 10), 5
    grid = BlockGrid(shape, 4)
    for rank in range(ways):
        shard = FlatShard.equal(shape, first, size, _Ranks(rank, tuple(range(3, 3 + 2 * ways, 2))))  # type: ignore[arg-type]
        of_elements, of_scales = shard.partition, shard.scales_partition(grid)
        assert of_elements is not None
        assert of_scales is not None
        assert of_elements.offset == of_scales.offset == 2 * rank
        held = torch.zeros(shape, dtype=torch.bool)
        held.view(-1)[shard.start : shard.end] = True
        assert torch.equal(_marked(of_elements.partition.parts(shape, 2 * rank), shape), held)
        begins = torch.zeros(13, 3, dtype=torch.bool)
        for block in range(39):
            begins.view(-1)[block] = shard.start <= grid.first_element(block) < shard.end
        assert torch.equal(_marked(of_scales.partition.parts((13, 3), 2 * rank), (13, 3)), begins)
    uneven = FlatShard.equal(shape, 0, 65, _Ranks(1, (0, 3)))  # type: ignore[arg-type]
    assert uneven.partition == (RangePartition(2, 3, 0, 65, 2), 3)
    assert FlatShard.equal(shape, 0, 50, _Ranks(1, (0, 3, 4))).partition is None  # type: ignore[arg-type]


def _marked(parts: list[Part], shape: tuple[int, ...]) -> torch.Tensor:
    found = torch.zeros(shape, dtype=torch.bool)
    for low, extents in parts:
        found[tuple(slice(a, a + b) for a, b in zip(low, extents, strict=True))] = True
    return found


class _Mesh:
    """A mesh of ranks from 5 on, as seen from one of them."""

    device_type = "cpu"

    def __init__(self, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
        self.mesh = torch.arange(5, 5 + math.prod(shape)).reshape(shape)
        self.shape, self.ndim, self._coordinate = shape, len(shape), list(coordinate)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def get_coordinate(self) -> list[int]:
        return self._coordinate


def _partitions_of(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Any, ...]) -> list[bool]:
    """For each rank, whether there is a partition; each is compared with the indices that the rank holds."""
    actual = []
    for coordinate in itertools.product(*map(range, mesh)):
        shard = DTensorShard(shape, _Mesh(mesh, coordinate), placements)  # type: ignore[arg-type]
        placed = shard.partition
        actual.append(placed is not None)
        if placed is not None:
            expected = [(low, shard.local_shape) for low, _ in boxes(shard.indices)]
            assert placed.partition.parts(shape, placed.offset) == expected
    return actual


@pytest.mark.parametrize("shape", [(97, 130), (6, 8), (40, 66), (3, 7, 12), (7,)], ids=str)
@pytest.mark.parametrize("mesh", [(4,), (2, 2), (3, 4), (2, 2, 2)], ids=str)
def test_placements(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    """All combinations of replicated and sharded dimensions are partitions, uneven ones too."""
    options = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    for placements in itertools.product(options, repeat=len(mesh)):
        assert all(_partitions_of(shape, mesh, placements))


@pytest.mark.parametrize(("rows", "is_rule"), [(6, True), (14, True), (8, True), (7, False)])
def test_fsdp2_and_tensor_parallel(rows: int, is_rule: bool) -> None:
    """Where the ranks of tensor parallel have equal parts, which FSDP2 may cut unevenly."""
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    assert _partitions_of((rows, 5), (3, 2), placements) == [is_rule] * 6
    assert _partitions_of((rows, 5), (3, 2), (_StridedShard(0, split_factor=3), Shard(0))) == [False] * 6
    assert _partitions_of((rows, 5), (3,), (_StridedShard(0, split_factor=2),)) == [False] * 3


def test_even_steps() -> None:
    assert [even_steps(x) for x in ((5,), (0, 1, 2), (3, 7, 11))] == [1, 1, 4]
    assert [even_steps(x) for x in ((2, 1), (0, 1, 3), (0, 0))] == [None, None, None]
