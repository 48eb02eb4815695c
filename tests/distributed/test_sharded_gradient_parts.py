"""Released gradients that come in parts, from fully_shard and from checkpoints; nothing outlives a sharded model."""

from __future__ import annotations

import gc
import weakref
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardopt
from ranks.layered import Layers, batch
from ranks.layouts import mesh_of
from ranks.offload import offload_from_cpu, slow_steps
from ranks.pool import Pool
from ranks.runs import snapshot_of
from ranks.snapshot import assert_same
from slow_cases import slow

STEPS = 3


class Recurrent(nn.Module):
    """A layer that is called twice, or once more with an input that has no gradient, and one that is called once.

    Args:
        recompute: whether layers are computed again by reentrant checkpoints, or by others; None for none.
        constant: whether the layer is called once more.
    """

    def __init__(self, recompute: bool | None = None, constant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.mix, self.once = nn.Linear(64, 64), nn.Linear(64, 64)
        self.recompute, self.constant = recompute, constant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.constant:
            x = x + self.mix(torch.ones(64))
        for _ in range(2):
            x = x + self._call(self.mix, torch.tanh(x))
        return self._call(self.once, x)

    def _call(self, layer: nn.Module, x: Tensor) -> Tensor:
        called: Tensor = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
        return called


def _sharded(model: Recurrent, layers: bool) -> nn.Module:
    mesh = mesh_of((dist.get_world_size(),))
    if layers:
        for layer in (model.mix, model.once):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _steps(recompute: bool | None, constant: bool, layers: bool, passes: int) -> list[tuple[str, ...]]:
    """Trains with released gradients and without; returns the gradients that were left for ``step()`` in each step."""
    models = [_sharded(Recurrent(recompute, constant), layers) for _ in range(2)]
    optimizers = [shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64) for model in models]
    shardopt.release_gradients(models[0], optimizers[0])
    left = []
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            for number in range(passes):
                model.set_requires_gradient_sync(number == passes - 1)  # type: ignore[operator]
                tokens = batch(100 * step + 10 * number + dist.get_rank())
                model(tokens).square().mean().backward()
            if model is models[0]:
                left.append(tuple(name for name, param in model.named_parameters() if param.grad is not None))
            optimizer.step()
            optimizer.zero_grad()
        assert_same(*(snapshot_of(*each) for each in zip(models, optimizers, strict=True)))
    return left


MIX = ("mix.weight", "mix.bias")
#: How layers are called, and which gradients are left; passes and the number of ranks.
CASES = [
    ((None, False, True, ()), 2, 3),
    *(((None, True, True, MIX), *on) for on in [(1, 1), (1, 3)]),  # no reduction says that it is the last
    ((None, True, False, ()), 1, 3),
    ((False, False, True, ()), 2, 3),
    ((False, True, True, MIX), 1, 3),
    *(((True, True, True, MIX), *on) for on in [(1, 1), (2, 3)]),
]
ALL_CASES = product(dict.fromkeys(case for case, *_ in CASES), (1, 2), (1, 2, 3))


@pytest.mark.parametrize(("case", "passes", "world_size"), [*CASES, *slow(ALL_CASES, besides=CASES)])
def test_modules_that_are_used_several_times(ranks: Pool, case: Any, passes: int, world_size: int) -> None:
    """Each use is reduced; with several passes, which are not reduced but for the last, too."""
    recompute, constant, layers, left = case
    found = ranks.run(world_size, _steps, recompute, constant, layers, passes)
    assert all(of_rank[1:] == [left] * (STEPS - 1) for of_rank in found)
    assert recompute is True or all(of_rank[0] == left for of_rank in found)


class Checkpointed(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, torch.tanh(x), use_reentrant=True)
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_with_reentrant_checkpoints(bucket_view: bool) -> None:
    """DDP's last bucket, and its end, come in the backward pass of a checkpoint: others may not have been reduced."""
    models = []
    for _ in range(2):
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        for index, layer in enumerate(layers):
            nn.init.constant_(layer.weight, 0.01 * (index + 1))
            nn.init.zeros_(layer.bias)
        models.append(
            DistributedDataParallel(
                Checkpointed(layers), static_graph=True, bucket_cap_mb=0.02, gradient_as_bucket_view=bucket_view
            )
        )
    optimizers = [shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64) for model in models]
    shardopt.release_gradients(models[0], optimizers[0])
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, 64, requires_grad=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models[0].state_dict(), models[1].state_dict())


def _wrapped(way: str) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(Layers())
    model, mesh = Layers(), mesh_of((dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _released(way: str, overlap_forward: bool) -> list[weakref.ref[Any]]:
    model = _wrapped(way)
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    shardopt.release_gradients(model, optimizer, overlap_forward=overlap_forward)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
    state = [x for entries in optimizer.state.values() for x in entries.values() if isinstance(x, Tensor)]
    return [weakref.ref(x) for x in (model, optimizer, *model.parameters(), *state)]


def _outlives(way: str, overlap_forward: bool) -> int:
    refs = _released(way, overlap_forward)
    gc.collect()
    return sum(ref() is not None for ref in refs)


@pytest.mark.parametrize("overlap_forward", [False, True])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_nothing_outlives_model_and_optimizer(ranks: Pool, way: str, overlap_forward: bool) -> None:
    assert ranks.run(2, _outlives, way, overlap_forward) == [0, 0]


@pytest.mark.ranks(2)
def test_two_optimizers_that_overlap_the_forward_pass() -> None:
    """Both wait where fully_shard gathers; one release ends before the other."""
    models, optimizers = [_wrapped("fsdp") for _ in range(2)], []
    with offload_from_cpu(), slow_steps(0.01):
        for model in models:
            params = list(model.parameters())
            optimizers.append([shardopt.AdamW8bit(own, offload="step") for own in (params[::2], params[1::2])])
        releases = [shardopt.release_gradients(models[0], own, overlap_forward=True) for own in optimizers[0]]
        for step in range(STEPS):
            for model, own in zip(models, optimizers, strict=True):
                model(batch(10 * step + dist.get_rank())).square().mean().backward()
                for optimizer in own:
                    optimizer.step()
                    optimizer.zero_grad()
            if step:
                releases.pop(0).remove()
        for optimizer in optimizers[0]:
            optimizer.synchronize()
        assert_same(*(snapshot_of(model, own[0]) for model, own in zip(models, optimizers, strict=True)))
