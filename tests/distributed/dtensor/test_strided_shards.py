"""Sharded parameters that are not contiguous: channels_last under DDP, DTensors with strided parts on some ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import shardopt
from helpers import RULES, everything
from ranks.layouts import COLUMN, ROW, WHOLE, Layout, shard, values
from ranks.pool import Pool
from ranks.snapshot import assert_same, assert_shards_of, entries
from shardopt.optim import ShardedOptimizer

OPTIONS = {"min_quantized_numel": 64, "block_size": 32}


def _convolutions() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 33, 3, padding=1), nn.ReLU(), nn.Conv2d(33, 12, 3))
    return model.to(memory_format=torch.channels_last)


def _train(released: bool, views: bool) -> dict[str, Tensor]:
    """Trains a channels_last model under DDP; and contiguous copies of its parameters with its gradients."""
    replica = DistributedDataParallel(_convolutions(), gradient_as_bucket_view=views)
    params = list(replica.parameters())
    optimizer = RULES["adamw"].make(params, **OPTIONS)
    copies = [Parameter(param.detach().contiguous()) for param in params]
    expected = RULES["adamw"].make(copies, **OPTIONS)
    gradients: dict[Tensor, Tensor] = {}
    for param in params:  # released gradients are gone after the backward pass
        param.register_hook(lambda gradient, param=param: gradients.__setitem__(param, gradient.clone()))
    if released:
        shardopt.release_gradients(replica, optimizer)
    for number in range(3):
        images = values((4, 3, 8, 8), 10 * number + dist.get_rank()).contiguous(memory_format=torch.channels_last)
        replica(images).square().mean().backward()
        for param, copied in zip(params, copies, strict=True):
            copied.grad = gradients[param].mul_(1.0 / dist.get_world_size()).contiguous()
            dist.all_reduce(copied.grad)
            if not released:
                assert torch.equal(param.grad, copied.grad)
        optimizer.step()
        optimizer.zero_grad()
        expected.step()
        assert_same(everything(optimizer), everything(expected))
    assert not params[0].is_contiguous()
    return everything(optimizer)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("views", [False, True])
def test_channels_last_under_ddp(ranks: Pool, views: bool, released: bool) -> None:
    first, second = ranks.run(2, _train, released, views)
    assert_same(first, second)


LAYOUTS = [((97, 130), COLUMN), ((70, 96), COLUMN), ((20, 7, 3, 3), COLUMN), ((97, 130), ROW), ((33, 66), WHOLE)]


def _strided(tensor: DTensor) -> DTensor:
    """A DTensor with this rank's part in reversed order of dimensions in memory."""
    local = tensor.to_local()
    dims = tuple(reversed(range(local.dim())))
    local = local.permute(dims).contiguous().permute(dims)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _some_parts_are_strided(codec: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Rank r's part of parameter p is strided where r + p is even, its gradient's where the step changes that."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ways = [Layout(shape, (world_size,), (placement,), dtype) for shape, placement in LAYOUTS]
    whole = {str(way): values(way.shape, index, dtype) for index, way in enumerate(ways)}
    parts = {}
    for index, way in enumerate(ways):
        part = shard(whole[str(way)].clone(), way)
        parts[str(way)] = _strided(part) if (rank + index) % 2 == 0 else part
    optimizers = [
        RULES["adamw"].make(list(params.values()), codec=codec, **OPTIONS, **options) for params in (whole, parts)
    ]
    for t in range(3):
        for index, way in enumerate(ways):
            gradient = values(way.shape, 100 * (t + 1) + index, dtype)
            whole[str(way)].grad, part = gradient, shard(gradient, way)
            parts[str(way)].grad = _strided(part) if (rank + index + t) % 3 == 0 else part
        for optimizer in optimizers:
            optimizer.step()
    assert_shards_of(entries(parts, optimizers[1]), entries(whole, optimizers[0]))
    expected, actual = (optimizer.full_precision_parameters() for optimizer in optimizers)
    assert_shards_of(
        {name: actual[param] for name, param in parts.items()}, {name: expected[param] for name, param in whole.items()}
    )
    check_contiguous(optimizers[1])


@pytest.mark.parametrize(("world_size", "codec"), [(2, "log8"), (3, "log8"), (3, "dynamic8"), (2, "fp32")])
def test_parts_that_are_strided_on_some_ranks(ranks: Pool, world_size: int, codec: str) -> None:
    """Blocks are cut: the ranks take part in the same exchanges, in the same order."""
    ranks.run(world_size, _some_parts_are_strided, codec, torch.float32, {})


@pytest.mark.parametrize("options", [{"master_weight_bits": 24}, {"stochastic_rounding": True}], ids=str)
def test_strided_parts_of_bfloat16(ranks: Pool, options: dict[str, Any]) -> None:
    ranks.run(2, _some_parts_are_strided, "log8", torch.bfloat16, options)


def check_contiguous(optimizer: ShardedOptimizer) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            assert (value.to_local() if isinstance(value, DTensor) else value).is_contiguous()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("codec", ["log8", "fp32"])
def test_torch_state_of_strided_parts(codec: str) -> None:
    """torch keeps the moments of a strided part laid out as it is."""
    ways = [Layout(shape, (2,), (placement,), torch.float32) for shape, placement in LAYOUTS]
    parts = [Parameter(_strided(shard(values(way.shape, index), way))) for index, way in enumerate(ways)]
    theirs = torch.optim.AdamW(parts, foreach=False)
    for param in parts:
        param.grad = param.detach() * 0.3
    theirs.step()
    assert any(not state["exp_avg"].to_local().is_contiguous() for state in theirs.state.values())
    ours = RULES["adamw"].make(parts, codec=codec, **OPTIONS)
    ours.load_state_dict(theirs.state_dict())
    check_contiguous(ours)
    if codec == "fp32":
        for param in parts:
            assert torch.equal(ours.state[param]["exp_avg"].to_local(), theirs.state[param]["exp_avg"].to_local())
    ours.step()
