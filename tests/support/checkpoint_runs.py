"""A run of one process with all kinds of parameters, whose checkpoints are loaded, compared and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from ranks.layouts import values
from shardopt.checkpoint import CheckpointError
from shardopt.optim import ShardedOptimizer


class Small(nn.Module):
    """A quantized matrix, one of bfloat16, a bias, a shared parameter, a frozen one and buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(values((33, 200), seed))
        self.brain = nn.Parameter(values((16, 512), seed + 1).bfloat16())
        self.bias = nn.Parameter(values((33,), seed + 2))
        self.same = self.weight
        self.frozen = nn.Parameter(values((4, 4), seed + 3), requires_grad=False)
        self.register_buffer("mean", values((5,), seed + 4))
        self.register_buffer("scratch", values((5,), seed + 5), persistent=False)


Run = tuple[Small, ShardedOptimizer]


def trained(seed: int = 0, steps: int = 2, **options: Any) -> Run:
    model = Small(seed)
    optimizer = shardopt.AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
    for step in range(steps):
        step_with(model, optimizer, seed + step)
    return model, optimizer


def step_with(model: Small, optimizer: ShardedOptimizer, seed: int) -> None:
    for index, param in enumerate(p for p in model.parameters() if p.requires_grad):
        param.grad = values(tuple(param.shape), 10 * seed + index, param.dtype)
    optimizer.step()


def everything(model: Small, optimizer: ShardedOptimizer) -> dict[str, Any]:
    """All that a checkpoint should bring back, copied."""
    found: dict[str, Any] = {name: x.clone() for name, x in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{name}/{key}"] = value.clone()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {**found, "groups": groups}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, b[key]) and x.dtype == b[key].dtype if isinstance(x, torch.Tensor) else x == b[key]
        for key, x in a.items()
    )


def assert_loads(path: str | Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Loads a checkpoint into another run, which is then the same; returns its extra values."""
    other, fresh = trained(seed=7, steps=0)
    loaded = shardopt.checkpoint.load(path, other, fresh)
    assert same(everything(other, fresh), expected)
    return loaded.extra


def assert_refuses(path: str | Path, message: str, *, convert: bool = False, **options: Any) -> None:
    """A run into which a checkpoint cannot be loaded is unchanged, and goes on. The error has the path, on one line."""
    model, optimizer = trained(seed=7, **options)
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError, match=message) as caught:
        shardopt.checkpoint.load(path, model, optimizer, convert=convert)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert same(everything(model, optimizer), before)
    step_with(model, optimizer, 9)
