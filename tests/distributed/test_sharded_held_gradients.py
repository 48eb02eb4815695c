"""Gradients of sharded models and of DDP held in the host's memory: the bits of a run without offload, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardopt
from ordered_problem import WAYS as ORDERED
from ordered_problem import loss_of, make_model
from ranks.layered import Layers, batch
from ranks.layouts import mesh_of
from ranks.offload import offload_from_cpu, slow_steps
from ranks.pool import Pool
from ranks.runs import snapshot_of
from ranks.snapshot import assert_same
from shardopt.release import host_gradients
from versions import needs_fsdp2_on_the_cpu


def _fsdp(model: Any, mesh: Any = None) -> nn.Module:
    mesh = mesh_of((dist.get_world_size(),)) if mesh is None else mesh
    fully_shard([model.embed, model.head], mesh=mesh)  # they share a weight
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tensor_parallel(model: Any) -> nn.Module:
    """Layers of both kinds of shards, whose columns cut blocks."""
    mesh = mesh_of((dist.get_world_size(),))
    for index, layer in enumerate(model.layers):
        way = ColwiseParallel(output_layouts=Replicate()) if index % 2 else RowwiseParallel(input_layouts=Replicate())
        parallelize_module(layer, mesh, {"1": way})
    return model


WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "fsdp": _fsdp,
    "fsdp of layers": lambda model: [fully_shard(layer) for layer in model.layers] and model,
    "ddp": lambda model: DistributedDataParallel(model, bucket_cap_mb=0.02),
    "ddp, views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
}


def _run(
    model: nn.Module,
    held: bool,
    rank: int,
    micro_batches: int = 2,
    kind: str = "AdamW8bit",
    unreduced: bool = False,
    scale: float | None = None,
    sums: bool = False,
    release: bool = False,
    clip: bool = True,
) -> dict[str, Any]:
    """All that a run ends with, and its norms.

    Args:
        model: the wrapped model.
        held: whether gradients are held in the host's memory.
        rank: the number of this rank's data.
        micro_batches: backward passes per step.
        kind: the optimizer's class.
        unreduced: whether only the last pass is reduced.
        scale: the first loss scale.
        sums: whether reduced gradients are added up by hand.
        release: whether gradients are released without being held.
        clip: whether to clip them.
    """
    options = {"lr": 1e-2, "min_quantized_numel": 64, "offload": "step" if held else None}
    optimizer = getattr(shardopt, kind)(model.parameters(), **options)
    brought = 1 if unreduced else micro_batches
    if held:
        shardopt.release_gradients(model, optimizer, overlap_forward=True, waiting_gradients=3, micro_batches=brought)
    elif release:
        shardopt.release_gradients(model, optimizer, micro_batches=brought)
    scaler = None if scale is None else GradScaler("cpu", init_scale=scale, growth_interval=2)
    norms = []
    for step in range(4):
        added: dict[Any, Any] = {}
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            if unreduced and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            no_sync = unreduced and not is_last and isinstance(model, DistributedDataParallel)
            with model.no_sync() if no_sync else nullcontext():  # type: ignore[operator]
                loss = model(batch(100 * step + 10 * micro + rank)).square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
            for param in model.parameters() if sums else ():
                if param.grad is not None:
                    added[param] = added[param] + param.grad if param in added else param.grad.clone()
                    param.grad = None
        for param, gradient in added.items():
            param.grad = gradient
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip:
            norms.append(shardopt.clip_grad_norm_(model.parameters(), 1e-3, optimizer=optimizer))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    optimizer.synchronize()
    scales = [] if scaler is None else [torch.tensor(scaler.get_scale())]
    return {**{f"norm {i}": x for i, x in enumerate([*norms, *scales])}, **snapshot_of(model, optimizer)}


def _compare(way: str, **options: Any) -> None:
    rank = 0 if way == "fsdp of layers" else dist.get_rank()  # there the ranks are to agree by themselves
    with offload_from_cpu(), slow_steps(0.002):
        actual = _run(WAYS[way](Layers()), True, rank, **options)
    # DDP reduces the sum of what it has reduced before and a new gradient, in other roundings than ours.
    by_hand = way.startswith("ddp") and not options.get("unreduced", False)
    assert_same(actual, _run(WAYS[way](Layers()), False, rank, **options, sums=by_hand))


@pytest.mark.parametrize("unreduced", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_same_bits(ranks: Pool, way: str, micro_batches: int, unreduced: bool) -> None:
    if way == "fsdp of layers" and unreduced:
        pytest.skip("the model has no set_requires_gradient_sync")
    ranks.run(2, partial(_compare, way, micro_batches=micro_batches, unreduced=unreduced))


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
@pytest.mark.parametrize("scale", [1024.0, 1e38])
def test_loss_scale(ranks: Pool, way: str, scale: float) -> None:
    """All ranks find the same infinities."""
    ranks.run(2, partial(_compare, way, scale=scale))


@pytest.mark.parametrize("kind", ["LAMB8bit", "Lion8bit"])
def test_rules_with_collectives(ranks: Pool, kind: str) -> None:
    ranks.run(2, partial(_compare, "fsdp", kind=kind))


def _in_budget_of_one_rank(kind: str) -> None:
    """The state of a parameter's part stays on the device of the rank that has fewer rows."""
    results, budget = [], 600
    for held in (True, False):
        with offload_from_cpu():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 3), nn.Linear(3, 3), nn.Linear(3, 64))
            for layer in model:
                fully_shard(layer, mesh=mesh_of((2,)))
            fully_shard(model, mesh=mesh_of((2,)))
            options = {"offload": "step", "device_state_budget": budget} if held else {}
            optimizer = getattr(shardopt, kind)(model.parameters(), lr=1e-2, min_quantized_numel=64, **options)
            if held:
                last = list(model.parameters())[-1]
                is_offloaded = optimizer._internals.residency.of(last).offload is not None
                assert is_offloaded == (dist.get_rank() == 0), "the budget does not tell the ranks apart"
                shardopt.release_gradients(model, optimizer, overlap_forward=True)
            for step in range(3):
                torch.manual_seed(10 * step + dist.get_rank())
                model(torch.randn(4, 64)).square().mean().backward()
                shardopt.clip_grad_norm_(model.parameters(), 1e-2, optimizer=optimizer)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            results.append(snapshot_of(model, optimizer))
    assert_same(*results)


@needs_fsdp2_on_the_cpu
@pytest.mark.parametrize("kind", ["AdamW8bit", "LAMB8bit"])
def test_state_that_fits_into_the_budget_of_one_rank(ranks: Pool, kind: str) -> None:
    ranks.run(2, _in_budget_of_one_rank, kind)


def _hybrid() -> None:
    results = []
    for held in (True, False):
        with offload_from_cpu(), slow_steps(0.002):
            model = _fsdp(Layers(), mesh_of((2, 2), "replicate", "shard"))
            results.append(_run(model, held, dist.get_rank()))
    assert_same(*results)


def test_hybrid_shards(ranks: Pool) -> None:
    ranks.run(4, _hybrid)


def _parallel() -> None:
    results = []
    for held in (True, False):
        with offload_from_cpu(), slow_steps(0.002):
            results.append(_run(_tensor_parallel(Layers()), held, 0))
    assert_same(*results)


def test_tensor_parallel(ranks: Pool) -> None:
    ranks.run(2, _parallel)


def _released(way: str, unreduced: bool) -> None:
    results = []
    for release in (True, False):
        model = WAYS[way](Layers())
        results.append(_run(model, False, dist.get_rank(), unreduced=unreduced, release=release, clip=False))
    assert_same(*results)


@pytest.mark.parametrize("unreduced", [False, True])
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_released_in_the_last_micro_batch(ranks: Pool, way: str, unreduced: bool) -> None:
    ranks.run(2, _released, way, unreduced)


def _ordered(way: str) -> None:
    results = []
    for held in (True, False):
        with offload_from_cpu(), slow_steps(0.002):
            model = ORDERED[way](make_model())
            shardopt.comm.ordered_gradients(model, micro_batches=4)
            optimizer = shardopt.AdamW8bit(
                model.parameters(), lr=1e-2, min_quantized_numel=64, offload="step" if held else None
            )
            if held:
                shardopt.release_gradients(model, optimizer, overlap_forward=True)
            norms = []
            for step in range(3):
                for number in range(dist.get_rank(), 4, dist.get_world_size()):
                    loss_of(model, number, step).backward()
                assert held == all(param.grad is None for param in model.parameters())
                norms.append(shardopt.clip_grad_norm_(model.parameters(), 0.5, optimizer=optimizer))
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            results.append({**snapshot_of(model, optimizer), **{f"norm {i}": norm for i, norm in enumerate(norms)}})
    assert_same(*results)


@needs_fsdp2_on_the_cpu
@pytest.mark.parametrize(("way", "world_size"), [("plain", 1), ("ddp", 2), ("fsdp", 2)])
def test_ordered_gradients(ranks: Pool, way: str, world_size: int) -> None:
    """Gradients go to the host once they are the mean over all micro-batches."""
    ranks.run(world_size, _ordered, way)


@pytest.mark.ranks(1)
def test_ordered_gradients_without_overlap_are_refused() -> None:
    model = make_model()
    shardopt.comm.ordered_gradients(model, micro_batches=2)
    with pytest.raises(RuntimeError, match=r"got a model with ordered_gradients.* pass overlap_forward=True"):
        shardopt.release_gradients(model, shardopt.AdamW8bit(model.parameters()))


class _Outer(nn.Module):
    """A model that is called by its part, so that no hook of its own forward pass waits for anything."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def _late_arrivals() -> None:
    begin_copy = host_gradients.begin_copy

    def late(to: Tensor, source: Tensor) -> Any:
        time.sleep(0.02)
        return begin_copy(to, source)

    results = []
    for held in (True, False):
        with offload_from_cpu(), patch.object(host_gradients, "begin_copy", late):
            model = _Outer(DistributedDataParallel(Layers(), gradient_as_bucket_view=True))
            optimizer = shardopt.AdamW8bit(
                model.parameters(), lr=1e-2, min_quantized_numel=64, offload="step" if held else None
            )
            if held:
                shardopt.release_gradients(
                    model, optimizer, overlap_forward=True, waiting_gradients=100, micro_batches=2
                )
            for step in range(3):  # DDP makes new buckets after the first pass
                added: list[Tensor] = []
                for micro in range(2):
                    model.inner(batch(100 * step + 10 * micro + dist.get_rank())).square().mean().backward()
                    if not held:
                        gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
                        added = [a + b for a, b in zip(added, gradients, strict=True)] if added else gradients
                        optimizer.zero_grad()
                for param, gradient in zip(model.parameters(), added, strict=True) if added else ():
                    param.grad = gradient
                optimizer.step()
                optimizer.synchronize()
                optimizer.zero_grad()
            optimizer.synchronize()
            results.append(snapshot_of(model, optimizer))
    assert_same(*results)


def test_buckets_are_not_overwritten_while_gradients_leave_them(ranks: Pool) -> None:
    ranks.run(2, _late_arrivals)
