"""The matrices of a parameter, however ranks divide it: with the bits of the unsharded step."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardopt
from helpers import Shape, limited
from ranks.collectives import counted_collectives
from ranks.flat import gathered
from ranks.layouts import COLUMN, ROW, WHOLE, Layout, distribute, shard, values
from ranks.models import fsdp1, make_net
from ranks.runs import SMALL, snapshot_of, step_with
from ranks.snapshot import assert_same, snapshot
from versions import cuts_uneven_strided_shards

STEPS = 3

# Matrices in a parameter ----------------------------------------------------------------------------------------------


#: Shapes and how they are divided: matrices that no rank holds whole, of one row, and fewer than ranks.
SPLITS: tuple[tuple[Shape, Any], ...] = (
    ((97, 130), (30, 1, 5, 61)),
    ((40, 7, 3, 3), (3, 37)),
    ((3, 33, 64), "each"),
    ((6, 5, 40), "each"),
    ((2, 4, 9, 8), "each"),
)


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "normalize"), [(2, "rows"), (3, None), (4, "rows"), (4, None)])
def test_splits(world_size: int, normalize: Any) -> None:
    size = world_size
    mesh = {2: (2, 1), 3: (1, 3), 4: (2, 2)}[size]
    ways = [((size,), (ROW,)), ((size,), (COLUMN,)), (mesh, (ROW, COLUMN)), (mesh, (WHOLE, ROW)), (mesh, (ROW, ROW))]
    whole, sharded = [], []
    cases = [*product(ways, SPLITS)]
    for placements in ((Shard(2), WHOLE), (ROW, Shard(2)), (COLUMN, Shard(2))):  # of a matrix its columns
        cases += [((mesh, placements), split) for split in SPLITS if split[1] == "each"]
    for index, ((on, placements), (shape, split)) in enumerate(cases):
        params = values(shape, index), shard(values(shape, index), Layout(shape, on, placements, torch.float32))
        for groups, param in zip((whole, sharded), params, strict=True):
            groups.append({"params": [nn.Parameter(param)], "split": split})
    options = {"adjust_lr_fn": "spectral_norm", "lr": 0.02, **SMALL}
    options["normalize"] = normalize
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


@pytest.mark.ranks(3)
def test_a_rank_without_columns() -> None:
    """The third rank has no column of a matrix, and yet second moments of its rows, as they are replicated."""
    shape, ways = (33, 2), (((3,), (COLUMN,)), ((3,), (ROW,)))
    for on, placements in ways:
        whole, sharded = (nn.Parameter(values(shape, 0)) for _ in range(2))
        sharded = nn.Parameter(shard(sharded.detach(), Layout(shape, on, placements, torch.float32)))
        optimizers = [shardopt.NorMuon8bit([param], lr=0.02, **SMALL) for param in (whole, sharded)]
        for step in range(STEPS):
            gradient = values(shape, 100 * (step + 1))
            whole.grad, sharded.grad = gradient, distribute(gradient, sharded.device_mesh, sharded.placements)
            for optimizer in optimizers:
                optimizer.step()
        expected, got = (snapshot({"x": p}, o) for p, o in zip((whole, sharded), optimizers, strict=True))
        assert_same(got, expected)
        moments = optimizers[1].state[sharded]["second_momentum_buffer"].to_local()
        if placements == (COLUMN,):
            assert moments.shape == (33, 1)
            assert torch.equal(moments, optimizers[0].state[whole]["second_momentum_buffer"])


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "normalize"), [(2, None), (3, "rows")])
def test_splits_of_flat_shards(world_size: int, normalize: Any) -> None:
    """FSDP1 and FSDP2 cut matrices of a fused parameter anywhere."""
    split = {"0.weight": (33, 1, 36), "1.weight": (20, 20)}
    models = [fsdp1(_matrices(), ["1"]), _matrices()]
    options = {**SMALL, "normalize": normalize}
    optimizers = [shardopt.Muon8bit(shardopt.muon_groups(model, split=split), **options) for model in models]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            step_with(model, optimizer, step)
    got, expected = (snapshot_of(m, o) for m, o in zip(models, optimizers, strict=True))
    assert_same(got, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [None, "each"])
def test_several_ranges_of_a_dim(split: Any) -> None:
    """Nothing is changed, and nothing travels."""
    placements = (_StridedShard(1, split_factor=2),)
    columns = 5 if cuts_uneven_strided_shards else 8
    layout = Layout((6, columns, 40), (dist.get_world_size(),), placements, torch.float32)
    param = nn.Parameter(shard(values(layout.shape, 0), layout))
    optimizer = shardopt.Muon8bit([param], split=split, **SMALL)
    param.grad = shard(values(layout.shape, 1), layout)
    with (
        counted_collectives() as found,
        pytest.raises(RuntimeError, match=r"got a parameter of shape .* with placements .* for Muon, expected"),
    ):
        optimizer.step()
    assert not found
    assert not optimizer.state
    assert torch.equal(param.to_local(), shard(values(layout.shape, 0), layout).to_local())


# Flat parameters of matrices only -------------------------------------------------------------------------------------


def _matrices(width: int = 40) -> nn.Sequential:
    """Layers without biases: a wide one, a tall one and a square one."""
    shapes = ((width, 70), (70, width), (width, width))
    model = nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in shapes))
    for index, param in enumerate(model.parameters()):
        with torch.no_grad():
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(index)))
    return model


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "strategy"), [(2, "NO_SHARD"), (2, "FULL_SHARD"), (3, "SHARD_GRAD_OP")])
def test_flat_parameters(world_size: int, strategy: str) -> None:
    """FSDP1 with ``use_orig_params=False``: an optimizer's parameter is several matrices."""
    got, whole = (
        fsdp1(_matrices(), ["1"], use_orig_params=False, sharding_strategy=ShardingStrategy[strategy]),
        _matrices(),
    )
    optimizers = [shardopt.Muon8bit(model.parameters(), **SMALL) for model in (got, whole)]
    for step in range(STEPS):
        for model, optimizer in zip((got, whole), optimizers, strict=True):
            step_with(model, optimizer, step)
    assert_same(gathered(got, optimizers[0]), snapshot_of(whole, optimizers[1]))


@pytest.mark.ranks(2)
def test_flat_parameters_for_both_rules() -> None:
    model = fsdp1(make_net(), ["up"], use_orig_params=False)
    with pytest.raises(ValueError, match=r"got a parameter of shape .* in a param group for Muon"):
        shardopt.Muon8bit(model.parameters(), **SMALL)
    with pytest.raises(
        ValueError, match=r"got .* in one flat parameter, expected the same options for all of its parts"
    ):
        shardopt.muon_groups(model)
