"""A storage that ``resize_`` freed or cut is refused, with the tables of a step kept or new; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import everything
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from step_changes import cut_in_place, resized
from step_problem import make, params_of, step

OPTIONS = {"master_weight_bits": 24}  # so that there are all kinds of state entries


#: The first parameter, and what belongs to it.
OPERANDS: dict[str, Callable[[ShardedOptimizer], Any]] = {
    "parameter": lambda optimizer: params_of(optimizer)[0],
    "gradient": lambda optimizer: params_of(optimizer)[0].grad,
    **{
        f"state {name}": lambda optimizer, name=name: optimizer.state[params_of(optimizer)[0]][name]
        for name in ("step", "exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales", "master_low_bits")
    },
}


@pytest.mark.parametrize(
    ("operand", "how"),
    [
        *((operand, "freed") for operand in OPERANDS),
        *product(["parameter", "gradient", "state step"], ["cut", "cut in place"]),
    ],
)
def test_a_storage_that_is_too_small_is_refused(operand: str, how: str) -> None:
    optimizer, expected = (make(dtype=torch.bfloat16, **OPTIONS) for _ in range(2))
    for t in range(3):
        step(optimizer, t)
        step(expected, t)
        before = everything(optimizer)
        tensor = OPERANDS[operand](optimizer)
        whole = tensor.untyped_storage().nbytes()
        left = 0 if how == "freed" else whole - 1
        message = (
            rf"^parameter 0 of param group 0 .*: got a {operand} whose storage has {left} bytes, expected {whole}: "
        )
        shorten = cut_in_place if how == "cut in place" else resized
        with shorten(tensor, left), pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert_same(everything(optimizer), before)
    assert_same(everything(optimizer), everything(expected))


@pytest.mark.parametrize(("fresh", "freed"), [(True, False), (False, False), (False, True)])
def test_a_gradient_that_is_a_part_of_a_cut_buffer(fresh: bool, freed: bool) -> None:
    """None has a null address; its bytes, or a strided one's elements, would fit into the rest of the buffer."""
    param = Parameter(torch.ones(64, 70))
    optimizer = shardopt.AdamW8bit([param])
    buffer = torch.ones(10_000 + 2 * 64 * 70)
    for part in (buffer[10_000 : 10_000 + 64 * 70].view(64, 70), buffer[10_000:].view(128, 70)[::2]):
        param.grad = part
        for _ in range(2):
            optimizer.step()
        before = everything(optimizer)
        with resized(buffer, 0 if freed else buffer.nbytes - 4 * 64 * 70 - 4):
            if fresh:
                param.grad = part.view_as(part)
            with pytest.raises(RuntimeError, match="got a gradient whose storage has"):
                optimizer.step()
        assert_same(everything(optimizer), before)
        optimizer.step()


@pytest.mark.parametrize("operand", ["parameter", "state exp_avg_codes", "state step"])
def test_a_parameter_without_a_gradient_may_be_freed(operand: str) -> None:
    """As an offload between uses does; it is stepped again when its memory is back."""
    optimizer, expected = (make(dtype=torch.bfloat16, **OPTIONS) for _ in range(2))
    for t, without in enumerate([(), (0,), (0,), (), (0,), ()]):
        step(expected, t, without)
        if without:
            with resized(OPERANDS[operand](optimizer), 0):
                step(optimizer, t, without)
        else:
            step(optimizer, t)
    assert_same(everything(optimizer), everything(expected))


#: Lists of parameters of which the first and the last share memory.
SHARED: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "twice": lambda w: [p := Parameter(w), p],
    "tied": lambda w: [p := Parameter(w), Parameter(p.detach())],
    "transposed": lambda w: [Parameter(w), Parameter(w.t())],
    "parts": lambda w: [Parameter(w[:40]), Parameter(torch.zeros(64, 64)), Parameter(w[39:])],
    "columns": lambda w: [Parameter(w[:, :33]), Parameter(w[:, 32:])],
    "one dtype within another": lambda w: [Parameter(w), Parameter(w.view(torch.bfloat16)[5:6])],
}


@pytest.mark.parametrize(
    ("kind", "way"), [*((kind, "constructor") for kind in SHARED), ("tied", "appended"), ("columns", "between steps")]
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_parameters_that_share_memory_are_refused(kind: str, way: str) -> None:
    params = SHARED[kind](values((64, 64), 0))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = shardopt.AdamW8bit(params if way == "constructor" else params[:-1], min_quantized_numel=64)
    if way == "between steps":
        optimizer.step()
        optimizer.param_groups[0]["params"] = params
    elif way == "appended":
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": params[-1:]})
    before = [param.detach().clone() for param in params]
    last = "0 of param group 1" if way == "appended" else f"{len(params) - 1} of param group 0"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"parameter {last}.* shares with parameter 0 of param group 0"):
            optimizer.step()
    assert all(torch.equal(param, expected) for param, expected in zip(params, before, strict=True))


def test_views_that_share_nothing_are_stepped() -> None:
    whole = values((64, 96), 0)
    parts = (whole[:, :32], whole[:, 32:64], whole[::2, 64:], whole[1::2, 64:], whole[0:0])
    apart, shared = ([Parameter(part.clone() if copied else part) for part in parts] for copied in (True, False))
    optimizers = [shardopt.AdamW8bit(params, min_quantized_numel=64) for params in (apart, shared)]
    for t in range(2):
        for optimizer in optimizers:
            step(optimizer, t)
    assert_same(*map(everything, optimizers))


def test_state_that_two_parameters_share_is_refused() -> None:
    optimizer = make("adamw", min_quantized_numel=0)
    step(optimizer, 0)
    first, second = params_of(optimizer)[:2]
    optimizer.state[second]["step"] = optimizer.state[first]["step"]
    with pytest.raises(RuntimeError, match=r"state step: got memory .* shares with parameter 0.* state step"):
        step(optimizer, 1)
