"""The bytes and collectives of a step of Muon, counted, and its peak memory."""

from __future__ import annotations

from collections import Counter

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardopt
import shardopt.sharding.exchange
from helpers import Shape, limited
from live_bytes import LiveBytes
from ranks.collectives import counted_collectives
from ranks.models import WAYS, make_net, set_gradients
from ranks.muon import MATRICES, of_groups
from ranks.pool import Pool
from ranks.runs import SMALL, single, snapshot_of, trained
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from shardopt.step.muon.matrices import padded


def _of_step(model: nn.Module, optimizer: ShardedOptimizer) -> tuple[Counter[str], dict[str, int]]:
    """The collectives of a second step by name, and their bytes."""
    for step in range(2):
        set_gradients(model, step)
        with counted_collectives() as found:
            optimizer.step()
    counts, nbytes = Counter(name for name, _ in found), dict.fromkeys({name for name, _ in found}, 0)
    for name, size in found:
        nbytes[name] += size
    return counts, nbytes


def _equal_matrices(memory: int | None, mesh: bool) -> tuple[Counter[str], dict[str, int], int]:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    size = dist.get_world_size()
    names = ("replicas", "shards")
    fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names) if mesh else None)
    optimizer = limited(shardopt.Muon8bit(model.parameters(), **SMALL), memory)
    return *_of_step(model, optimizer), 8 * 64 * 64


@pytest.mark.parametrize(
    ("world_size", "hybrid", "memory", "waves"), [(2, False, None, 1), (2, False, 1, 8), (4, True, None, 1)]
)
def test_each_element_travels_twice(ranks: Pool, world_size: int, hybrid: bool, memory: int | None, waves: int) -> None:
    """By two exchanges per wave, 4 bytes in all: also where other ranks have copies of the shards.

    Before that the ranks exchange two answers of 4 bytes, and two for each matrix.
    """
    shards = world_size // 2 if hybrid else world_size
    for counts, nbytes, numel in ranks.run(world_size, _equal_matrices, memory, hybrid):
        assert counts == {"allreduce": 1, "alltoall_base": 2 * waves}
        assert nbytes == {"allreduce": 8 * (1 + 8), "alltoall_base": 4 * numel // shards}


def _net(way: str) -> tuple[Counter[str], dict[str, int]]:
    model = WAYS[way](make_net())
    return _of_step(model, of_groups(model))


def _padded_bytes(ranks_of: int, shapes: Counter[Shape]) -> int:
    """Of all directions if rows are divided among ranks, each one's in units of 16 bytes."""
    total = 0
    for (rows, cols), count in shapes.items():
        each = -(-rows // ranks_of)
        held = [max(min(each, rows - rank * each), 0) * cols for rank in range(ranks_of)]
        total += count * 2 * sum(map(padded, held))
    return total


def test_bytes_of_a_model(ranks: Pool) -> None:
    """Uneven and empty shards: there and back over all ranks, rounded up; AdamW's parameters take no part."""
    found = ranks.run(3, _net, "fsdp")
    assert all(counts == {"allreduce": 1, "alltoall_base": 2} for counts, _ in found)
    assert sum(nbytes["alltoall_base"] for _, nbytes in found) == 2 * _padded_bytes(3, MATRICES)


def test_bytes_of_ddp(ranks: Pool) -> None:
    """Each owner sends its matrices to the others once."""
    for counts, nbytes in ranks.run(2, _net, "ddp"):
        assert counts == {"allreduce": 1, "broadcast": 2}
        assert nbytes["broadcast"] == _padded_bytes(1, MATRICES)


def test_a_rank_alone_sends_nothing(ranks: Pool) -> None:
    for way in ("ddp", "single"):
        ((counts, _),) = ranks.run(1, _net, way)
        assert not counts


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "most"), [(3, 1), (4, 2)])
def test_messages_to_few_ranks_at_a_time(world_size: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardopt.sharding.exchange, "MOST_PEERS", most)
        for way in ("fsdp", "fsdp1"):
            assert_same(snapshot_of(*trained(way, 2, "normuon")), single(2, "normuon"))


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
