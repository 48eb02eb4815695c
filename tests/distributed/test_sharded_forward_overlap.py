"""Steps that go on during the next forward pass of sharded models and of DDP: the bits of ordinary steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import shardopt
from ranks.layered import Layers, batch
from ranks.layouts import mesh_of
from ranks.offload import before_steps, offload_from_cpu, slow_steps
from ranks.pool import Pool
from ranks.runs import snapshot_of
from ranks.snapshot import assert_same
from shardopt.release.forward_overlap import ForwardOverlap
from shardopt.release.fsdp_groups import fsdp_groups
from shardopt.sharding.exchange import RanksExchange

_ALL_REDUCE = RanksExchange._all_reduce


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
    "fsdp that prefetches": lambda model: _fsdp(model, prefetch=2),
    "fsdp of layers": lambda model: [fully_shard(layer) for layer in model.layers] and model,
    "ddp": DistributedDataParallel,
}


def _run(
    model: nn.Module, offload: str | None, rank: int, between: Callable[[], Any] = bool, kind: str = "AdamW8bit"
) -> dict[str, Any]:
    """All that a run ends with, and its outputs; ``between`` is called after each step and may have some, too."""
    with offload_from_cpu(), slow_steps(0.02):
        options = {"lr": 1e-2, "min_quantized_numel": 64, "offload": offload}
        optimizer = getattr(shardopt, kind)(model.parameters(), **options)
        if offload is not None:
            shardopt.release_gradients(model, optimizer, overlap_forward=True, waiting_gradients=100)
        outputs = []
        for step in range(3):
            outputs.append(model(batch(10 * step + rank)))
            outputs[-1].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                found = between()
            outputs += [found] if isinstance(found, Tensor) else []
        optimizer.synchronize()
    return {**{f"output {i}": x.detach().clone() for i, x in enumerate(outputs)}, **snapshot_of(model, optimizer)}


def _compare(way: str, recompute: bool = False, kind: str = "AdamW8bit") -> None:
    rank = 0 if way == "fsdp of layers" else dist.get_rank()  # there the ranks are to agree by themselves
    expected, actual = (_run(WAYS[way](Layers(recompute)), offload, rank, kind=kind) for offload in (None, "step"))
    assert_same(actual, expected)


@pytest.mark.parametrize("way", WAYS)
def test_same_bits(ranks: Pool, way: str) -> None:
    ranks.run(2, _compare, way)


@pytest.mark.ranks(2)
def test_steps_with_collectives() -> None:
    """Sharded steps are taken in the thread of the backward pass, since their collectives must not meet its own."""
    threads = []

    def recorded(self: RanksExchange, tensor: Tensor, op: Any) -> None:
        threads.append(threading.current_thread())
        _ALL_REDUCE(self, tensor, op)

    with patch.object(RanksExchange, "_all_reduce", recorded):
        _compare("fsdp", kind="LAMB8bit")
    assert set(threads) == {threading.current_thread()}


def test_recomputed_activations(ranks: Pool) -> None:
    ranks.run(2, _compare, "fsdp", True)


def _gathered(between: str) -> None:
    """Reads that are no forward pass of the model: what FSDP2 gathers is of after the step."""
    runs = []
    for offload in (None, "step"):
        model: Any = _fsdp(Layers())
        register_fsdp_forward_method(model, "embedded")
        reads = {
            "a method": lambda model=model: model.embedded(batch(9)).clone(),
            "a layer": model.layers[1].unshard,
            "the model": lambda model=model: model.unshard(async_op=True),
        }
        runs.append(_run(model, offload, 0, reads[between]))
    assert_same(runs[1], runs[0])


@pytest.mark.parametrize("between", ["a method", "a layer", "the model"])
def test_what_is_gathered_by_hand(ranks: Pool, between: str) -> None:
    ranks.run(2, _gathered, between)


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


@pytest.mark.ranks(2)
def test_gathering_without_waiting_has_other_bits() -> None:
    """The tests above can fail."""
    original = ForwardOverlap._wait_for
    ForwardOverlap._wait_for = lambda self, params: None
    try:
        with pytest.raises((AssertionError, RuntimeError)):
            _gathered("the model")
    finally:
        ForwardOverlap._wait_for = original
    dist.barrier()


@pytest.mark.ranks(1)
def test_removed() -> None:
    model = _fsdp(Layers())
    optimizer = shardopt.AdamW8bit(model.parameters(), offload="step")
    groups = list(fsdp_groups(model))
    with shardopt.release_gradients(model, optimizer, overlap_forward=True):
        assert all(len(group.before_gather) == 1 for group in groups)
    assert not any(group.before_gather for group in groups)
    assert list(fsdp_groups(model)) == groups, "torch's groups are wrapped once"
