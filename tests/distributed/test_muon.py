"""Muon under everything that shards: the bits of one rank, with little travelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shardopt.checkpoint
import shardopt.sharding.exchange
from pairs import slow
from ranks.models import WAYS, make_net, set_gradients
from ranks.pool import Pool
from ranks.runs import snapshot_of, trained
from ranks.snapshot import assert_same

STEPS = 3
NOT_FLAT = [way for way in WAYS if "flat" not in way and way not in ("single", "zero")]
FEW = {
    2: ("fsdp", "fsdp bf16", "fsdp offload", "fsdp1"),
    3: ("fsdp columns", "hsdp of one", "tp", "fsdp1 grad"),
    4: ("fsdp", "hsdp", "hsdp columns", "fsdp tp", "fsdp columns tp", "fsdp1 hybrid", "fsdp1 nested"),
}


def _as_single(way: str, rule: str, options: dict[str, Any]) -> None:
    got = snapshot_of(*trained(way, STEPS, rule, **options))
    if dist.get_rank() == 0:
        assert_same(got, snapshot_of(*trained("single", STEPS, rule, **options)))


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        *((world_size, way) for world_size, ways in FEW.items() for way in ways),
        *slow((world_size, way) for world_size in (1, 2, 3, 4) for way in NOT_FLAT if "tp" not in way),
    ],
)
def test_as_single(ranks: Pool, world_size: int, way: str) -> None:
    if world_size % 2 and way in ("hsdp", "hsdp columns", "fsdp1 hybrid"):
        pytest.skip("needs an even number of ranks")
    ranks.run(world_size, _as_single, way, "muon_in_waves", {})


# Who shares work with whom --------------------------------------------------------------------------------------------


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


def _counted_broadcasts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sources of broadcasts of directions, as they come."""
    sources: list[int] = []
    broadcast = shardopt.sharding.exchange.RanksExchange.broadcast

    def counted(self: Any, tensor: torch.Tensor, source: int) -> Any:
        sources.append(source)
        return broadcast(self, tensor, source)

    monkeypatch.setattr(shardopt.sharding.exchange.RanksExchange, "broadcast", counted)
    return sources


def _replicas_share() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        sources = _counted_broadcasts(monkeypatch)
        model = DistributedDataParallel(make_net())
        optimizer = shardopt.Muon8bit(shardopt.muon_groups(model))
        _assert_equal(_step(model, optimizer), _stepped_alone([0]))
        assert set(sources) == set(range(dist.get_world_size()))
        optimizer.attach(model.module)
        sources.clear()
        _assert_equal(_step(model, optimizer, 1), _stepped_alone([0, 1]))
        assert not sources
        optimizer.attach(model)
        _assert_equal(_step(model, optimizer, 2), _stepped_alone([0, 1, 2]))
        assert sources


def test_replicas_share_work(ranks: Pool) -> None:
    """If the groups are of the wrapped model, or after attach()."""
    ranks.run(2, _replicas_share)


def _share_nothing_alone() -> None:
    model = DistributedDataParallel(make_net())
    shardopt.muon_groups(model)
    if dist.get_rank() == 0:
        shardopt.muon_groups(model).table()
        optimizer = shardopt.Muon8bit(shardopt.muon_groups(model.module))
        _assert_equal(_step(model, optimizer), _stepped_alone([0]))


def test_one_rank_may_go_on_alone(ranks: Pool) -> None:
    """An optimizer of the bare model waits for nobody, whatever was read of the wrapped one."""
    ranks.run(2, _share_nothing_alone)


def _wrapped_again() -> None:
    whole, halves = make_net(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shardopt.muon_groups(DistributedDataParallel(whole))
    half = dist.get_rank() // 2
    model = DistributedDataParallel(whole, process_group=halves[half])
    optimizer = shardopt.Muon8bit(shardopt.muon_groups(model))
    if half == 0:  # those of the first wrapping would wait for the other half
        _assert_equal(_step(model, optimizer), _stepped_alone([0]))


def test_wrapped_again_over_other_ranks(ranks: Pool) -> None:
    ranks.run(4, _wrapped_again)


def _zero_redundancy(path: str) -> None:
    model = DistributedDataParallel(make_net())
    optimizer = ZeroRedundancyOptimizer(shardopt.muon_groups(model), optimizer_class=shardopt.Muon8bit)
    shardopt.muon_groups(model)
    optimizer.optim.attach(model)
    _assert_equal(_step(model, optimizer), _stepped_alone([0]))
    shardopt.checkpoint.save(path, model, optimizer)
    shardopt.checkpoint.load(path, model, optimizer)
    _assert_equal(_step(model, optimizer, 1), _stepped_alone([0, 1]))


def test_zero_redundancy_shares_nothing(ranks: Pool, tmp_path: Path) -> None:
    """Each rank has parameters of its own, also once the wrapped model was read: by attach() or a checkpoint."""
    ranks.run(2, _zero_redundancy, str(tmp_path / "checkpoint"))
