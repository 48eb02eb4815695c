"""A run of one process with all kinds of parameters, whose checkpoints are loaded, compared and refused."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

import shardopt
from attack.contents import Content, Small
from ranks.layouts import values
from shardopt.checkpoint import CheckpointError
from shardopt.optim import ShardedOptimizer


def trained(seed: int = 0, steps: int = 2, **options: Any) -> Content:
    """A model with a shared parameter, too, and its optimizer."""
    model = Small(seed)
    model.same = model.weight
    optimizer = shardopt.AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
    for step in range(steps):
        step_with(model, optimizer, seed + step)
    return Content(model, optimizer)


def step_with(model: Small, optimizer: ShardedOptimizer, seed: int) -> None:
    for index, param in enumerate(p for p in model.parameters() if p.requires_grad):
        param.grad = values(tuple(param.shape), 10 * seed + index, param.dtype)
    optimizer.step()


def everything(model: Small, optimizer: ShardedOptimizer) -> Hashable:
    """All that a checkpoint should bring back."""
    return Content(model, optimizer).fingerprint()


def assert_loads(path: str | Path, expected: Hashable) -> dict[str, Any]:
    """Loads a checkpoint into another run, which is then the same; returns its extra values."""
    other = trained(seed=7, steps=0)
    loaded = other.load(path)
    assert not other.difference(expected)
    return loaded.extra


def assert_refuses(path: str | Path, message: str, *, convert: bool = False, **options: Any) -> None:
    """A run into which a checkpoint cannot be loaded is unchanged, and goes on. The error has the path, on one line."""
    run = trained(seed=7, **options)
    before = run.fingerprint()
    with pytest.raises(CheckpointError, match=message) as caught:
        shardopt.checkpoint.load(path, *run, convert=convert)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert not run.difference(before)
    step_with(*run, 9)
