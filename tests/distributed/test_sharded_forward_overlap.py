"""Steps that go on during the next forward pass of sharded models and of DDP: the bits of ordinary steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardopt
from ranks.layered import Layers, batch
from ranks.layouts import mesh_of
from ranks.offload import offload_from_cpu, slow_steps
from ranks.pool import Pool
from ranks.runs import snapshot_of
from ranks.snapshot import assert_same
from shardopt.integrations import forward_overlap


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


def _compare(way: str, recompute: bool = False) -> None:
    found = []
    for offload in (None, "step"):
        model = WAYS[way](Layers(recompute))
        with offload_from_cpu(), slow_steps(0.01):
            optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=64, offload=offload)
            if offload is not None:
                shardopt.release_gradients(model, optimizer, overlap_forward=True, waiting_gradients=100)
            for step in range(3):
                rank = 0 if way == "fsdp of layers" else dist.get_rank()  # where others are to agree by themselves
                model(batch(10 * step + rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
        found.append(snapshot_of(model, optimizer))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("way", WAYS)
def test_same_bits(ranks: Pool, way: str) -> None:
    ranks.run(2, _compare, way)


def test_recomputed_activations(ranks: Pool) -> None:
    ranks.run(2, _compare, "fsdp", True)


def _without_prefetch() -> None:
    original = forward_overlap._gathered_with
    forward_overlap._gathered_with = lambda module: [module]
    try:
        with pytest.raises(AssertionError):
            _compare("fsdp that prefetches")
    finally:
        forward_overlap._gathered_with = original
    dist.barrier()


def test_prefetching_without_waiting_has_other_bits(ranks: Pool) -> None:
    """The tests above can fail."""
    ranks.run(2, _without_prefetch)
