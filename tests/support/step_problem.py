"""Optimizers with odd parameters, contiguous or not, their steps, and whether a change between two steps is noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import shardopt
from helpers import CASES, Shape, everything, limited, with_gradient
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from shardopt.step.stepper import Stepper

SHAPES: tuple[Shape, ...] = ((64, 130), (300,), (40, 256), (7,), (7,))
#: Wide, tall, with cut blocks, one row, one column, a convolution, and one that is stored in float32.
MATRICES: tuple[Shape, ...] = ((40, 130), (97, 64), (1, 257), (70, 1), (12, 7, 3, 3), (5, 9))
MUON_OPTIONS: dict[str, Any] = {"lr": 0.02, "min_quantized_numel": 64}
STRIDED_OPTIONS: dict[str, Any] = {"min_quantized_numel": 64, "block_size": 32}

#: Tensors that a change replaced stay allocated, so that stale addresses would harm them and not the process.
kept: list[Any] = []


def start(dtype: torch.dtype = torch.float32, shapes: Sequence[Shape] = MATRICES) -> list[Parameter]:
    return [Parameter(values(shape, i, dtype)) for i, shape in enumerate(shapes)]


def in_two_groups(rule: str, params: Sequence[Tensor], **options: Any) -> ShardedOptimizer:
    half = (1 + len(params)) // 2
    return CASES[rule].make([{"params": params[:half]}, {"params": params[half:], "weight_decay": 0.0}], **options)


def make(rule: str = "adamw", dtype: torch.dtype = torch.float32, **options: Any) -> ShardedOptimizer:
    return in_two_groups(rule, start(dtype, SHAPES), **options)


def make_muon(
    dtype: torch.dtype = torch.float32, shapes: tuple[Shape, ...] = MATRICES, memory: int | None = None, **options: Any
) -> ShardedOptimizer:
    return limited(shardopt.Muon8bit(start(dtype, shapes), **{**MUON_OPTIONS, **options}), memory)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def gradient(shape: Shape, t: int, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return values(tuple(shape), 100 * (t + 1) + index, dtype)


def step(optimizer: Optimizer, t: int, without: Sequence[int] = (), grad_dtype: torch.dtype | None = None) -> None:
    for index, param in enumerate(params_of(optimizer)):
        if index in without:
            param.grad = None
        else:
            with_gradient(param, gradient(param.shape, t, index, param.dtype).to(grad_dtype or param.dtype))
    optimizer.step()


def advance(optimizer: Optimizer, steps: Sequence[int]) -> Optimizer:
    for t in steps:
        step(optimizer, t)
    return optimizer


def assert_equal(*optimizers: Optimizer) -> None:
    assert_same(*(everything(each) for each in optimizers))


# Parameters that are not contiguous -----------------------------------------------------------------------------------


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def within(x: Tensor) -> Tensor:
    """Columns of a wider matrix, which is zero elsewhere."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 9, dtype=x.dtype)
    return wide[..., 4:-5].copy_(x)


def every_third(x: Tensor) -> Tensor:
    return torch.zeros(3 * x.shape[0], *x.shape[1:], dtype=x.dtype)[1::3].copy_(x)


def reversed_dims(x: Tensor) -> Tensor:
    dims = tuple(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims)


#: The parameters of :func:`make_strided`: their shapes, and how they lie in memory.
LAYOUTS: tuple[tuple[Shape, Callable[[Tensor], Tensor]], ...] = (
    ((33, 7, 3, 3), channels_last),
    ((40, 96), Tensor.contiguous),
    ((64, 32, 3, 3), channels_last),
    ((70, 130), reversed_dims),
    ((48, 40), within),
    ((9, 257), every_third),
    ((5, 11, 13), reversed_dims),
    ((20, 30, 1, 1), channels_last),
    ((300,), every_third),
    ((), Tensor.contiguous),
)


def make_strided(
    rule: str = "adamw", *, strided: bool = True, dtype: torch.dtype = torch.float32, **options: Any
) -> ShardedOptimizer:
    """An optimizer of parameters that lie in memory as :data:`LAYOUTS` say, or contiguous ones."""
    found = [values(shape, index, dtype) for index, (shape, _) in enumerate(LAYOUTS)]
    params = [Parameter(layout(x) if strided else x) for x, (_, layout) in zip(found, LAYOUTS, strict=True)]
    return in_two_groups(rule, params, **{**STRIDED_OPTIONS, **options})


def set_gradients(optimizer: Optimizer, t: int, grad_dtype: torch.dtype | None = None) -> None:
    """Gradients laid out as the parameters are, contiguous, and otherwise, in turn; in step 2 some have none.

    Where all parameters are contiguous, so are the gradients.
    """
    params = params_of(optimizer)
    strided = any(not param.is_contiguous() for param in params)
    for index, (param, (_, layout)) in enumerate(zip(params, LAYOUTS, strict=True)):
        given = gradient(param.shape, t, index, param.dtype).to(grad_dtype or param.dtype)
        turn = (t + index) % 4
        if strided:
            given = (layout, Tensor.contiguous, reversed_dims, layout)[turn](given)
        with_gradient(param, given)
        if t == 2 and turn == 1:
            param.grad = None


def run(optimizer: Optimizer, steps: Sequence[int] = range(5), **options: Any) -> Any:
    for t in steps:
        set_gradients(optimizer, t, **options)
        optimizer.step()
    return optimizer


def assert_equal_and_contiguous(got: ShardedOptimizer, expected: ShardedOptimizer) -> None:
    """Asserts equal bits, and contiguous state."""
    got.synchronize()
    assert_equal(got, expected)
    assert all(value.is_contiguous() for state in got.state.values() for value in state.values())


# Changes between steps ------------------------------------------------------------------------------------------------


def put(optimizer: ShardedOptimizer, index: int, key: str, change: Callable[[Tensor], Tensor]) -> None:
    """Puts another tensor in the place of a state entry."""
    state = optimizer.state[params_of(optimizer)[index]]
    kept.append(state[key])
    state[key] = change(state[key].clone())


def put_data(optimizer: ShardedOptimizer, index: int, key: str, change: Callable[[Tensor], Tensor]) -> None:
    """Gives a state entry other memory; the tensor is the same object."""
    tensor = optimizer.state[params_of(optimizer)[index]][key]
    kept.append(tensor.data)
    tensor.data = change(tensor.data.clone())


def set_option(group: int, **options: Any) -> Callable[[ShardedOptimizer], None]:
    return lambda optimizer: optimizer.param_groups[group].update(options)


@contextmanager
def tables_made() -> Iterator[list[int]]:
    """Notes of each table that is made inside how many parameters it has."""
    made: list[int] = []
    original = Stepper._make_tables

    def make_tables(*args: Any) -> Any:
        made.append(len(args[1]))
        return original(*args)

    with patch.object(Stepper, "_make_tables", make_tables):
        yield made


def assert_noticed(change: Callable[[ShardedOptimizer], object], optimizer: ShardedOptimizer) -> None:
    """Changes the optimizer between steps, and another that makes its tables anew in every step alike."""
    anew = copy.deepcopy(optimizer)
    removed: list[tuple[Tensor, Tensor]] = []
    for t in range(6):
        if t == 3:
            before = params_of(optimizer)
            change(optimizer)
            change(anew)
            left = {id(param) for param in params_of(optimizer)}
            removed = [(param, param.detach().clone()) for param in before if id(param) not in left]
        anew = copy.deepcopy(anew)
        step(optimizer, t)
        step(anew, t)
        assert_equal(optimizer, anew)
        for param, as_it_was in removed:
            assert torch.equal(param, as_it_was)
