"""Gradients held in the host's memory, and steps during the next forward pass, beside ``test_layouts.py``."""

from __future__ import annotations

import threading
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
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import shardopt
from ordered_problem import WAYS as ORDERED
from ordered_problem import loss_of, make_model
from ranks.layered import Layers, batch
from ranks.layouts import mesh_of
from ranks.offload import before_steps, offload_from_cpu, slow_steps
from ranks.pool import Pool
from ranks.runs import snapshot_of
from ranks.snapshot import assert_same
from shardopt.release import host_gradients
from shardopt.release.forward_overlap import ForwardOverlap
from shardopt.release.fsdp_groups import fsdp_groups
from shardopt.sharding.exchange import RanksExchange
from versions import needs_fsdp2_on_the_cpu


def _fsdp(model: Any, prefetch: int = 0) -> nn.Module:
    mesh = mesh_of((dist.get_world_size(),))
    fully_shard([model.embed, model.head], mesh=mesh)  # they share a weight
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    for index, layer in enumerate(model.layers):
        layer.set_modules_to_forward_prefetch(list(model.layers[index + 1 : index + 1 + prefetch]))
    return fully_shard(model, mesh=mesh)


WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "fsdp": _fsdp,
    "fsdp that prefetches": partial(_fsdp, prefetch=2),
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
    between: Callable[[], Any] = bool,
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
        between: called after each step; what it returns is compared, too.
    """
    options = {"lr": 1e-2, "min_quantized_numel": 64, "offload": "step" if held else None}
    optimizer = getattr(shardopt, kind)(model.parameters(), **options)
    brought = 1 if unreduced else micro_batches
    if held:
        shardopt.release_gradients(model, optimizer, overlap_forward=True, waiting_gradients=3, micro_batches=brought)
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
        norms.append(shardopt.clip_grad_norm_(model.parameters(), 1e-3, optimizer=optimizer))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            found = between()
        norms += [found] if isinstance(found, Tensor) else []
    optimizer.synchronize()
    scales = [] if scaler is None else [torch.tensor(scaler.get_scale())]
    return {**{f"norm {i}": x for i, x in enumerate([*norms, *scales])}, **snapshot_of(model, optimizer)}


def _compare(way: str, recompute: bool = False, **options: Any) -> None:
    rank = 0 if way == "fsdp of layers" else dist.get_rank()  # there the ranks are to agree by themselves
    with offload_from_cpu(), slow_steps(0.002):
        actual = _run(WAYS[way](Layers(recompute)), True, rank, **options)
    # DDP reduces the sum of what it has reduced before and a new gradient, in other roundings than ours.
    by_hand = way.startswith("ddp") and not options.get("unreduced", False)
    assert_same(actual, _run(WAYS[way](Layers(recompute)), False, rank, **options, sums=by_hand))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("fsdp", {"unreduced": True, "recompute": True}),
        ("fsdp", {"scale": 1024.0}),
        ("fsdp that prefetches", {"micro_batches": 1}),
        ("fsdp of layers", {}),
        ("ddp", {"unreduced": True}),
        ("ddp", {"scale": 1e38}),  # all ranks find the same infinities
        ("ddp, views", {}),
    ],
    ids=str,
)
def test_same_bits(way: str, options: dict[str, Any]) -> None:
    _compare(way, **options)


@pytest.mark.ranks(2)
def test_steps_with_collectives() -> None:
    """Sharded steps are taken in the thread of the backward pass, since their collectives must not meet its own."""
    threads, all_reduce = [], RanksExchange._all_reduce

    def recorded(self: RanksExchange, tensor: Tensor, op: Any) -> None:
        threads.append(threading.current_thread())
        all_reduce(self, tensor, op)

    with patch.object(RanksExchange, "_all_reduce", recorded):
        _compare("fsdp", kind="LAMB8bit")
    assert set(threads) == {threading.current_thread()}


def _gathered(between: str) -> None:
    """Reads that are no forward pass of the model: what FSDP2 gathers is of after the step."""
    runs = []
    for held in (False, True):
        model: Any = _fsdp(Layers())
        register_fsdp_forward_method(model, "embedded")
        reads = {
            "a method": lambda model=model: model.embedded(batch(9)).clone(),
            "a layer": model.layers[1].unshard,
            "the model": lambda model=model: model.unshard(async_op=True),
        }
        with offload_from_cpu(), slow_steps(0.02):
            runs.append(_run(model, held, 0, micro_batches=1, between=reads[between]))
    assert_same(runs[1], runs[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("between", ["a method", "a layer", "the model"])
def test_what_is_gathered_by_hand(between: str) -> None:
    _gathered(between)


@pytest.mark.ranks(2)
def test_gathering_without_waiting_has_other_bits() -> None:
    """The test above can fail."""
    wrong = pytest.raises((AssertionError, RuntimeError))
    with patch.object(ForwardOverlap, "_wait_for", lambda self, params: None), wrong:
        _gathered("the model")
    dist.barrier()


@pytest.mark.ranks(2)
def test_evaluations_of_the_module_within() -> None:
    """The module inside of DDP waits as DDP does."""
    model = DistributedDataParallel(Layers())
    go_on = threading.Event()
    with offload_from_cpu(), before_steps(lambda place: go_on.wait(30)):
        optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=64, offload="step")
        shardopt.release_gradients(model, optimizer, overlap_forward=True, waiting_gradients=100)
        model(batch(dist.get_rank())).square().mean().backward()
        optimizer.step()
        threading.Timer(0.2, go_on.set).start()
        with torch.no_grad():
            early = model.module(batch(0))
            optimizer.synchronize()
            assert torch.equal(early, model.module(batch(0)))


@pytest.mark.ranks(1)
def test_removed() -> None:
    model = _fsdp(Layers())
    optimizer = shardopt.AdamW8bit(model.parameters(), offload="step")
    groups = list(fsdp_groups(model))
    with shardopt.release_gradients(model, optimizer, overlap_forward=True):
        assert all(len(group.before_gather) == 1 for group in groups)
    assert not any(group.before_gather for group in groups)
    assert list(fsdp_groups(model)) == groups, "torch's groups are wrapped once"


@needs_fsdp2_on_the_cpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["AdamW8bit", "LAMB8bit"])
def test_state_that_fits_into_the_budget_of_one_rank(kind: str) -> None:
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


@pytest.mark.ranks(2)
def test_buckets_are_not_overwritten_while_gradients_leave_them() -> None:
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
