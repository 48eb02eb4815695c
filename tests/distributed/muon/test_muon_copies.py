"""Ranks with copies of a model share Muon's work, if they know of each other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shardopt
import shardopt.checkpoint
import shardopt.sharding.exchange
from helpers import Shape
from ranks.models import make_net, set_gradients
from ranks.muon import MATRICES, of_groups, orthogonalized
from ranks.pool import Pool
from ranks.runs import snapshot_of, step_with
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer

STEPS = 3


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


@pytest.mark.ranks(2)
def test_replicas_share_work() -> None:
    """If the groups are of the wrapped model, or after attach()."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        sources = _counted_broadcasts(monkeypatch)
        model = DistributedDataParallel(make_net())
        optimizer = shardopt.Muon8bit(shardopt.muon_groups(model))
        _step(model, optimizer)
        assert set(sources) == set(range(dist.get_world_size()))
        optimizer.attach(model.module)
        _step(model, optimizer, 1)  # begins by saying that the plan is another
        sources.clear()
        _step(model, optimizer, 2)
        assert not sources
        optimizer.attach(model)
        _assert_equal(_step(model, optimizer, 3), _stepped_alone([0, 1, 2, 3]))
        assert sources


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


def _whole(**options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    model = make_net()
    optimizer = of_groups(model, **options)
    for step in range(STEPS):
        step_with(model, optimizer, step)
    return model, optimizer


def _ddp(options: dict[str, Any]) -> list[Shape]:
    model = DistributedDataParallel(make_net())
    optimizer = of_groups(model, **options)
    with orthogonalized() as computed:
        for step in range(STEPS):
            step_with(model, optimizer, step)
    assert_same(snapshot_of(model, optimizer), snapshot_of(*_whole(**options)))
    return computed


@pytest.mark.parametrize(("world_size", "options"), [(1, {}), (2, {"memory": 1}), (3, {"normalize": "rows"})])
def test_ddp_shares_the_work(ranks: Pool, world_size: int, options: dict[str, Any]) -> None:
    computed = ranks.run(world_size, _ddp, options)
    assert sum(map(Counter, computed), Counter()) == Counter({shape: STEPS * n for shape, n in MATRICES.items()})
    assert all(computed)
