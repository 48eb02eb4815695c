"""Small runs whose checkpoints are converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardopt
from ranks.runs import snapshot_of
from ranks.snapshot import assert_same
from shardopt import checkpoint
from shardopt.optim import ShardedOptimizer

PIECE = 4096  # elements, so that most tensors are cut, some within rows


class Evil:
    """Makes a file where a pickle of it is executed."""

    def __reduce__(self) -> Any:
        return open, ("executed", "w")


class Net(nn.Module):
    """Rows that are no multiples of blocks, one longer than a piece, float32 state, a frozen parameter, a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.uneven = nn.Parameter(torch.randn(33, 301).to(dtype))
        self.long = nn.Parameter(torch.randn(2, 3, 3001).to(dtype))
        self.bias = nn.Parameter(torch.randn(77).to(dtype))
        self.scalar = nn.Parameter(torch.randn(()).to(dtype))
        self.frozen = nn.Parameter(torch.randn(5, 1000).to(dtype), requires_grad=False)
        self.register_buffer("seen", torch.arange(3))


def make(kind: str = "AdamW", dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Net, ShardedOptimizer]:
    torch.manual_seed(0)
    model = Net(dtype)
    groups = [
        {"params": [model.uneven, model.bias], "lr": 0.1},
        {"params": [model.long, model.scalar], "weight_decay": 0.25},
    ]
    return model, getattr(shardopt, kind)(groups, **{"codec": "log8", **options})


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        for param in model.parameters():
            if param.requires_grad:
                param.grad = (torch.randn(param.shape) * torch.randn(param.shape).exp()).to(param.dtype)
        optimizer.step()


def trained(kind: str = "AdamW", dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Net, ShardedOptimizer]:
    model, optimizer = make(kind, dtype, **options)
    step(model, optimizer)
    return model, optimizer


def assert_loads(path: Path, expected: tuple[nn.Module, ShardedOptimizer], *made: Any, **options: Any) -> None:
    """Asserts that a portable checkpoint, loaded without conversion, is this run, which then goes on alike."""
    model, optimizer = make(*made, **options)
    loaded = checkpoint.load(path, model, optimizer)
    assert loaded.converted == {}
    assert_same(snapshot_of(model, optimizer), snapshot_of(*expected))
    for group, other in zip(optimizer.param_groups, expected[1].param_groups, strict=True):
        assert {**group, "params": 0} == {**other, "params": 0}
