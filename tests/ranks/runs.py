"""Short runs of the model that come out the same in whatever way it is sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from helpers import RULES
from ranks.models import WAYS, make_net, named_parameters, set_gradients
from ranks.snapshot import Snapshot, snapshot
from shardopt.optim import ShardedOptimizer


def trained(way: str, steps: int, rule: str = "adamw", **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    """The model sharded in one of the ``WAYS`` and its optimizer, after so many :func:`step_with`."""
    model = WAYS[way](make_net())
    optimizer = RULES[rule].make(model.parameters(), min_quantized_numel=64, **options)
    for step in range(steps):
        step_with(model, optimizer, step)
    return model, optimizer


def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Takes the run's step of this number."""
    set_gradients(model, step)
    optimizer.step()
    optimizer.zero_grad()


def snapshot_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """The run in full; all ranks must call this."""
    return snapshot(named_parameters(model), optimizer)
