"""A storage that ``resize_`` freed or cut is refused, with the tables of a step kept or new; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers import everything
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from step_changes import cut_in_place, resized
from step_problem import make, params_of, step

OPTIONS = {"master_weight_bits": 24}  # so that there are all kinds of state entries


def gradient_of(optimizer: ShardedOptimizer) -> Tensor:
    gradient = params_of(optimizer)[0].grad
    assert gradient is not None
    return gradient


def state_entry(name: str) -> Callable[[ShardedOptimizer], Tensor]:
    return lambda optimizer: optimizer.state[params_of(optimizer)[0]][name]


OPERANDS: dict[str, Callable[[ShardedOptimizer], Tensor]] = {
    "parameter": lambda optimizer: params_of(optimizer)[0],
    "gradient": gradient_of,
    **{
        f"state {name}": state_entry(name)
        for name in ("step", "exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales", "master_low_bits")
    },
}


@pytest.mark.parametrize("how", ["freed", "cut", "cut in place"])
@pytest.mark.parametrize("operand", OPERANDS)
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


def test_gradients_in_a_buffer_that_was_freed() -> None:
    """None of them has a null address: each has its offset in the buffer."""
    optimizer, expected = make(), make()
    sizes = [param.numel() for param in params_of(optimizer)]
    buffer = torch.zeros(100_000 + sum(sizes))
    parts = buffer[100_000:].split(sizes)
    for t in range(3):
        step(expected, t)
        for index, (param, part) in enumerate(zip(params_of(optimizer), parts, strict=True)):
            part.copy_(values(tuple(param.shape), 100 * (t + 1) + index).flatten())
            param.grad = part.view(param.shape)
        optimizer.step()
        before = everything(optimizer)
        with resized(buffer, 0), pytest.raises(RuntimeError, match="got a gradient whose storage has 0 bytes"):
            optimizer.step()
        assert_same(everything(optimizer), before)
    assert_same(everything(optimizer), everything(expected))


@pytest.mark.parametrize("fresh", [True, False])
def test_a_gradient_that_is_a_part_of_a_cut_buffer(fresh: bool) -> None:
    """The gradient's bytes would fit into the rest of the buffer; so would the elements of a strided one."""
    params = [torch.nn.Parameter(torch.ones(64, 70)) for _ in range(2)]
    optimizer = type(make())(params)
    buffer = torch.ones(10_000 + 2 * 64 * 70)
    parts = buffer[10_000 : 10_000 + 64 * 70].view(64, 70), buffer[10_000:].view(128, 70)[::2]
    for part in parts:
        params[0].grad, params[1].grad = part, torch.ones(64, 70)
        for _ in range(2):
            optimizer.step()
        before = everything(optimizer)
        with resized(buffer, buffer.nbytes - 4 * 64 * 70 - 4):
            if fresh:
                params[0].grad = part.view_as(part)
            with pytest.raises(RuntimeError, match="got a gradient whose storage has"):
                optimizer.step()
        assert_same(everything(optimizer), before)
        optimizer.step()


@pytest.mark.parametrize("operand", [name for name in OPERANDS if name != "gradient"])
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


def test_what_has_no_elements_needs_no_storage() -> None:
    param = torch.nn.Parameter(torch.zeros(0, 130))
    optimizer = type(make())([param])
    for _ in range(3):
        param.grad = torch.zeros(0, 130)
        optimizer.step()
    assert optimizer.state[param]["step"] == 3
