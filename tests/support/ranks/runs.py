"""Short runs of the model that come out the same in whatever way it is sharded."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from helpers import CASES
from ranks.flat import gathered, is_flat
from ranks.models import WAYS, make_net, named_parameters, set_gradients
from ranks.snapshot import Snapshot, snapshot
from shardopt.optim import ShardedOptimizer

SMALL = {"min_quantized_numel": 64}


def make_optimizer(way: str, model: nn.Module, rule: str = "adamw", **options: Any) -> ShardedOptimizer:
    """The optimizer for a model sharded in one of the ``WAYS``; under "zero" the one around it."""
    case, options = CASES[rule], {**SMALL, **options}
    if way == "zero":
        hyper = {**case.hyper, **options}
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=case.optimizer, **hyper)
    return case.make(model.parameters(), **options)


def trained(
    way: str, steps: int, rule: str = "adamw", *, seed: int = 0, **options: Any
) -> tuple[nn.Module, ShardedOptimizer]:
    """The model sharded in one of the ``WAYS`` and its optimizer, after so many :func:`step_with`."""
    model = WAYS[way](make_net(seed=seed))
    optimizer = make_optimizer(way, model, rule, **options)
    for step in range(steps):
        step_with(model, optimizer, step)
    return model, optimizer


def single(steps: int, rule: str = "adamw", **options: Any) -> Snapshot:
    """The snapshot of the unsharded run after so many steps; each is taken once per process."""
    return _single(steps, rule, tuple(options.items()))


@lru_cache(maxsize=64)
def _single(steps: int, rule: str, options: tuple[tuple[str, Any], ...]) -> Snapshot:
    return snapshot_of(*trained("single", steps, rule, **dict(options)))


def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Takes the run's step of this number."""
    set_gradients(model, step)
    optimizer.step()
    optimizer.zero_grad()


def snapshot_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """The run in full; all ranks must call this."""
    if is_flat(model):
        return gathered(model, optimizer)
    return snapshot(named_parameters(model), optimizer)
