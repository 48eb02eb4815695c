"""Parameters and gradients that are not contiguous, beside contiguous copies, and a model that has some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from helpers import RULES, everything, with_gradient
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from step_problem import params_of

BF16 = torch.bfloat16
OPTIONS = {"min_quantized_numel": 64, "block_size": 32}


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def transposed(x: Tensor) -> Tensor:
    return x.T.contiguous().T


def within(x: Tensor) -> Tensor:
    """Columns of a wider matrix, which is zero elsewhere."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 9, dtype=x.dtype)
    return wide[..., 4:-5].copy_(x)


def every_third(x: Tensor) -> Tensor:
    return torch.zeros(3 * x.shape[0], *x.shape[1:], dtype=x.dtype)[1::3].copy_(x)


def reversed_dims(x: Tensor) -> Tensor:
    dims = tuple(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims)


Layout = Callable[[Tensor], Tensor]

#: The parameters of :func:`make`: their shapes, and how they lie in memory.
LAYOUTS: tuple[tuple[tuple[int, ...], Layout], ...] = (
    ((33, 7, 3, 3), channels_last),
    ((40, 96), Tensor.contiguous),
    ((64, 32, 3, 3), channels_last),
    ((70, 130), transposed),
    ((48, 40), within),
    ((9, 257), every_third),
    ((5, 11, 13), reversed_dims),
    ((20, 30, 1, 1), channels_last),
    ((300,), every_third),
    ((), Tensor.contiguous),
)


def make(
    rule: str = "adamw", *, strided: bool = True, dtype: torch.dtype = torch.float32, **options: Any
) -> ShardedOptimizer:
    """An optimizer of parameters that lie in memory as :data:`LAYOUTS` say, or contiguous ones."""
    found = [values(shape, index, dtype) for index, (shape, _) in enumerate(LAYOUTS)]
    params = [Parameter(layout(x) if strided else x) for x, (_, layout) in zip(found, LAYOUTS, strict=True)]
    groups = [{"params": params[:4]}, {"params": params[4:], "weight_decay": 0.0}]
    return RULES[rule].make(groups, **{**OPTIONS, **options})


def set_gradients(optimizer: ShardedOptimizer, t: int, grad_dtype: torch.dtype | None = None) -> None:
    """Gradients laid out as the parameters are, contiguous, and otherwise, in turn; in step 2 some have none.

    Where all parameters are contiguous, so are the gradients.
    """
    params = params_of(optimizer)
    strided = any(not param.is_contiguous() for param in params)
    for index, (param, (_, layout)) in enumerate(zip(params, LAYOUTS, strict=True)):
        gradient = values(tuple(param.shape), 100 * (t + 1) + index, param.dtype).to(grad_dtype or param.dtype)
        turn = (t + index) % 4
        if strided:
            gradient = (layout, Tensor.contiguous, reversed_dims, layout)[turn](gradient)
        with_gradient(param, gradient)
        if t == 2 and turn == 1:
            param.grad = None


def run(optimizer: ShardedOptimizer, steps: Sequence[int] = range(5), **options: Any) -> ShardedOptimizer:
    for t in steps:
        set_gradients(optimizer, t, **options)
        optimizer.step()
    return optimizer


def assert_equal(got: ShardedOptimizer, expected: ShardedOptimizer) -> None:
    """Asserts equal bits, and contiguous state."""
    got.synchronize()
    assert_same(everything(got), everything(expected))
    for state in got.state.values():
        assert all(value.is_contiguous() for value in state.values())
