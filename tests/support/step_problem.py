"""Problem of the tests of kept tables: an optimizer with odd parameters, and its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Parameter

from helpers import RULES, everything, with_gradient
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from shardopt.step.stepper import Stepper

SHAPES = ((64, 130), (300,), (40, 256), (7,), (7,))

#: Tensors that a change replaced stay allocated, so that stale addresses would harm them and not the process.
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
        assert_same(everything(optimizer), everything(anew))
        for param, as_it_was in removed:
            assert torch.equal(param, as_it_was)
