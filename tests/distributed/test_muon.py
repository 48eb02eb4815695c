"""Muon on ranks beside ``test_layouts.py``: matrices within parameters, who works, and the bytes that travel."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import shardopt
import shardopt.checkpoint
import shardopt.sharding.rank_group
from helpers import Shape, limited
from live_bytes import LiveBytes
from ranks.collectives import counted_collectives
from ranks.layouts import COLUMN, ROW, WHOLE, Layout, distribute, mesh_of, shard, values
from ranks.models import fsdp1, make_net, set_gradients
from ranks.pool import Pool
from ranks.runs import SMALL, snapshot_of, step_with
from ranks.snapshot import assert_same, snapshot
from shardopt.kernels.newton_schulz import NewtonSchulz
from shardopt.optim import ShardedOptimizer

STEPS = 3


def of_groups(model: nn.Module, memory: int | None = None, split: Any = None, **options: Any) -> ShardedOptimizer:
    """Muon with the groups of :func:`shardopt.muon_groups`, in waves of so much memory."""
    return limited(shardopt.Muon8bit(shardopt.muon_groups(model, split=split), **SMALL, **options), memory)


#: Shapes and how they are divided: matrices that no rank holds whole, of one row, and fewer than ranks.
SPLITS: tuple[tuple[Shape, Any], ...] = (
    ((97, 130), (30, 1, 5, 61)),
    ((40, 7, 3, 3), (3, 37)),
    ((3, 33, 64), "each"),
    ((6, 5, 40), "each"),
    ((2, 4, 9, 8), "each"),
    ((33, 2), None),  # ranks without a column have second moments of its rows, as they are replicated
)


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "normalize"), [(3, None), (4, "rows")])
def test_splits(world_size: int, normalize: Any) -> None:
    """Every second of all combinations, on other ranks the other half of them."""
    size = world_size
    mesh = {3: (1, 3), 4: (2, 2)}[size]
    ways = [((size,), (ROW,)), ((size,), (COLUMN,)), (mesh, (ROW, COLUMN)), (mesh, (WHOLE, ROW)), (mesh, (ROW, ROW))]
    whole, sharded = [], []
    cases = [(way, split) for split, way in product(SPLITS, ways)]
    for placements in ((Shard(2), WHOLE), (ROW, Shard(2)), (COLUMN, Shard(2))):  # of a matrix its columns
        cases += [((mesh, placements), split) for split in SPLITS if split[1] == "each"]
    for index, ((on, placements), (shape, split)) in enumerate(cases[size % 2 :: 2]):
        params = values(shape, index), shard(values(shape, index), Layout(shape, on, placements, torch.float32))
        for groups, param in zip((whole, sharded), params, strict=True):
            groups.append({"params": [nn.Parameter(param)], "split": split})
    options = {"adjust_lr_fn": "spectral_norm", "lr": 0.02, "normalize": normalize, **SMALL}
    optimizers = [limited(shardopt.Muon8bit(groups, **options), 100_000) for groups in (whole, sharded)]
    for step, (optimizer, groups) in product(range(2), zip(optimizers, (whole, sharded), strict=True)):
        for index, group in enumerate(groups):
            (param,) = group["params"]
            gradient = values(tuple(param.shape), 100 * (step + 1) + index)
            like = isinstance(param, DTensor)
            param.grad = distribute(gradient, param.device_mesh, param.placements) if like else gradient
        optimizer.step()
    named = [{str(i): group["params"][0] for i, group in enumerate(groups)} for groups in (whole, sharded)]
    expected, got = (snapshot(params, optimizer) for params, optimizer in zip(named, optimizers, strict=True))
    assert_same(got, expected)


def _matrices() -> nn.Sequential:
    """Layers without biases: a wide one, a tall one and a square one."""
    model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in ((40, 70), (70, 40), (40, 40))))
    for index, param in enumerate(model.parameters()):
        param.data = values(tuple(param.shape), index)
    return model


FLAT: dict[str, Any] = {"use_orig_params": False}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "options", "normalize"),
    [
        (2, {}, None),
        (3, {}, "rows"),
        (2, {**FLAT, "sharding_strategy": ShardingStrategy.NO_SHARD}, None),
        (3, {**FLAT, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, None),
    ],
)
def test_flat_shards(world_size: int, options: dict[str, Any], normalize: Any) -> None:
    """FSDP1 cuts matrices of a fused parameter anywhere; with ``use_orig_params=False`` one is several matrices."""
    split = None if options else {"0.weight": (33, 1, 36), "1.weight": (20, 20)}
    models = [fsdp1(_matrices(), ["1"], **options), _matrices()]
    optimizers = [of_groups(model, split=split, normalize=normalize) for model in models]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            step_with(model, optimizer, step)
    assert_same(*(snapshot_of(m, o) for m, o in zip(models, optimizers, strict=True)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> list[torch.Tensor]:
    set_gradients(model, seed)
    optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def _stepped_alone(seeds: list[int]) -> list[torch.Tensor]:
    model = make_net()
    optimizer = shardopt.Muon8bit(shardopt.muon_groups(model))
    return [_step(model, optimizer, seed) for seed in seeds][-1]


def _assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.ranks(2)
def test_replicas_share_work() -> None:
    """If the groups are of the wrapped model, or after attach()."""
    model = DistributedDataParallel(make_net())
    optimizer = shardopt.Muon8bit(shardopt.muon_groups(model))

    def broadcasts(seed: int) -> int:
        with counted_collectives() as found:
            _step(model, optimizer, seed)
        return sum(name == "broadcast" for name, _ in found)

    assert broadcasts(0)
    optimizer.attach(model.module)
    _step(model, optimizer, 1)  # begins by saying that the plan is another
    assert not broadcasts(2)
    optimizer.attach(model)
    assert broadcasts(3)
    _assert_equal([param.detach() for param in model.parameters()], _stepped_alone([0, 1, 2, 3]))


@pytest.mark.ranks(2)
def test_one_rank_may_go_on_alone() -> None:
    """An optimizer of the bare model waits for nobody, whatever was read of the wrapped one."""
    model = DistributedDataParallel(make_net())
    shardopt.muon_groups(model)
    if dist.get_rank() == 0:
        shardopt.muon_groups(model).table()
        optimizer = shardopt.Muon8bit(shardopt.muon_groups(model.module))
        _assert_equal(_step(model, optimizer), _stepped_alone([0]))


@pytest.mark.ranks(4)
def test_wrapped_again_over_other_ranks() -> None:
    whole, halves = make_net(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shardopt.muon_groups(DistributedDataParallel(whole))
    half = dist.get_rank() // 2
    model = DistributedDataParallel(whole, process_group=halves[half])
    optimizer = shardopt.Muon8bit(shardopt.muon_groups(model))
    if half == 0:  # those of the first wrapping would wait for the other half
        _assert_equal(_step(model, optimizer), _stepped_alone([0]))


@pytest.mark.ranks(2)
def test_zero_redundancy_shares_nothing(tmp_path: Path) -> None:
    """Each rank has parameters of its own, also once the wrapped model was read: by attach() or a checkpoint."""
    model = DistributedDataParallel(make_net())
    optimizer = ZeroRedundancyOptimizer(shardopt.muon_groups(model), optimizer_class=shardopt.Muon8bit)
    shardopt.muon_groups(model)
    optimizer.optim.attach(model)
    _assert_equal(_step(model, optimizer), _stepped_alone([0]))
    shardopt.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    shardopt.checkpoint.load(tmp_path / "checkpoint", model, optimizer)
    _assert_equal(_step(model, optimizer, 1), _stepped_alone([0, 1]))


def _second_step(way: str, memory: int | None) -> tuple[dict[str, tuple[int, int]], int]:
    """Eight equal matrices: how many collectives of each name there are, of how many bytes; matrices computed here."""
    model, size = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))), dist.get_world_size()
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif way != "single":
        fully_shard(model, mesh=mesh_of((2, size // 2), "replicas", "shards") if way == "hsdp" else None)
    optimizer = limited(shardopt.Muon8bit(model.parameters(), **SMALL), memory)
    optimizer.attach(model)
    for step in range(2):
        set_gradients(model, step)
        with (
            counted_collectives() as found,
            patch.object(NewtonSchulz, "__call__", autospec=True, side_effect=NewtonSchulz.__call__) as computed,
        ):
            optimizer.step()
    names = {name for name, _ in found}
    counted = {name: [nbytes for other, nbytes in found if other == name] for name in names}
    return {name: (len(each), sum(each)) for name, each in counted.items()}, computed.call_count


NUMEL = 8 * 64 * 64
#: Three answers and two for each matrix, of 4 bytes.
AGREED = {"allreduce": (1, 4 * (3 + 2 * 8))}


@pytest.mark.parametrize(
    ("way", "world_size", "memory", "expected"),
    [
        ("fsdp", 2, None, AGREED | {"alltoall_base": (2, 4 * NUMEL // 2)}),
        ("fsdp", 2, 1, AGREED | {"alltoall_base": (2 * 8, 4 * NUMEL // 2)}),
        ("hsdp", 4, None, AGREED | {"alltoall_base": (2, 4 * NUMEL // 2)}),
        ("ddp", 2, None, AGREED | {"broadcast": (2, 2 * NUMEL)}),
        ("ddp", 1, None, {}),
        ("single", 1, None, {}),
    ],
)
def test_each_element_travels_twice(ranks: Pool, way: str, world_size: int, memory: int | None, expected: Any) -> None:
    """By two exchanges per wave, 4 bytes in all; under DDP each owner sends its directions once."""
    found = ranks.run(world_size, _second_step, way, memory)
    assert all(sent == expected for sent, _ in found), found
    assert sum(computed for _, computed in found) == 8 * (2 if way == "hsdp" else 1)  # by each replica


def _most_bytes(way: str, pairs: int, memory: int) -> int:
    """The most bytes of new tensors that live at a time during the second step."""
    shapes = [(260, 100), (100, 130)] * pairs
    model = nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for outputs, inputs in shapes))
    if way == "fsdp":
        fully_shard(model)
    optimizer = of_groups(DistributedDataParallel(model) if way == "ddp" else model, memory)
    for step in range(2):
        set_gradients(model, step)
        with LiveBytes() as live:
            optimizer.step()
    return live.most


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_memory_is_kept_to(ranks: Pool, way: str) -> None:
    """On each rank, with what it gathers; a thread of gloo may hold a wave a moment longer, which is a third of it."""
    least = max(ranks.run(2, _most_bytes, way, 1, 1))
    for more in (200_000, 300_000):
        found = ranks.run(2, _most_bytes, way, 12, least + more)
        assert all(least <= most <= least + more * 4 / 3 for most in found), f"{found}, {least} at least"
