"""What the tests of kept tables share: an optimizer with odd parameters, and its steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from helpers import RULES, with_gradient
from ranks.layouts import values
from shardopt.optim import ShardedOptimizer

SHAPES = ((64, 130), (300,), (40, 256), (7,), (7,))

#: What a change replaced stays allocated, so that stale addresses would do harm to it and not to the process.
kept: list[Any] = []


def make(rule: str = "adamw", dtype: torch.dtype = torch.float32, **options: Any) -> ShardedOptimizer:
    params = [Parameter(values(shape, i, dtype)) for i, shape in enumerate(SHAPES)]
    return RULES[rule].make([{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}], **options)


def params_of(optimizer: ShardedOptimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def step(optimizer: ShardedOptimizer, t: int, without: tuple[int, ...] = (), grad_dtype: torch.dtype | None = None):
    for index, param in enumerate(params_of(optimizer)):
        gradient = values(tuple(param.shape), 100 * (t + 1) + index, param.dtype).to(grad_dtype or param.dtype)
        if index in without:
            param.grad = None
        else:
            with_gradient(param, gradient)
    optimizer.step()
