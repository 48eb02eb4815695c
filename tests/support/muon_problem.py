"""Parameters for Muon in one process, their gradients and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import (
    Shape,
    everything,
    limited,
    with_gradient,
)
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer

#: Wide, tall, with cut blocks, one row, one column, a convolution, and one that is stored in float32.
SHAPES: tuple[Shape, ...] = ((40, 130), (97, 64), (1, 257), (70, 1), (12, 7, 3, 3), (5, 9))
OPTIONS: dict[str, Any] = {"lr": 0.02, "min_quantized_numel": 64}
STEPS = 3


def start(dtype: torch.dtype = torch.float32, shapes: tuple[Shape, ...] = SHAPES) -> list[Parameter]:
    return [Parameter(values(shape, i, dtype)) for i, shape in enumerate(shapes)]


def gradient(shape: Shape, step: int, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return values(shape, 100 * (step + 1) + index, dtype)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def advance(optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype | None = None) -> torch.optim.Optimizer:
    for step in steps:
        for index, param in enumerate(params_of(optimizer)):
            with_gradient(param, gradient(tuple(param.shape), step, index, dtype or param.dtype))
        optimizer.step()
    return optimizer


def make(
    dtype: torch.dtype = torch.float32, shapes: tuple[Shape, ...] = SHAPES, memory: int | None = None, **options: Any
) -> ShardedOptimizer:
    return limited(shardopt.Muon8bit(start(dtype, shapes), **{**OPTIONS, **options}), memory)


def assert_equal(*optimizers: torch.optim.Optimizer) -> None:
    assert_same(*(everything(each) for each in optimizers))
