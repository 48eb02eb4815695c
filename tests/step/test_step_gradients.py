"""Gradients that come, go, move or are of other kinds, or cannot be stepped, with the tables of a step kept."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn import Parameter

import shardopt
from helpers import RULES, everything, with_gradient
from ranks.layouts import values
from ranks.offload import offload_from_cpu
from ranks.snapshot import assert_same
from step_problem import SHAPES, kept, make, params_of, step, tables_made
from wrappers import Scaled, Twice, Wrapped, zeros

FP32, BF16 = torch.float32, torch.bfloat16


def test_gradients_come_and_go() -> None:
    """A parameter without a gradient is left alone, its step count too; also before its first gradient."""
    optimizer = make()
    anew = copy.deepcopy(optimizer)
    absent = [(2, 3), (), (0,), (0, 1), (), (3,), (0, 1, 2, 3, 4), (), (0,), ()]
    for t, without in enumerate(absent):
        anew = copy.deepcopy(anew)
        before = everything(optimizer)
        step(optimizer, t, without)
        step(anew, t, without)
        after = everything(optimizer)
        assert_same(after, everything(anew))
        for index in without:
            names = [name for name in after if name.split("/")[0] == str(index)]
            assert_same({name: after[name] for name in names}, {name: before[name] for name in names})
    assert [float(optimizer.state[p]["step"]) for p in params_of(optimizer)] == [6, 8, 8, 7, 9]


def test_data_of_a_gradient() -> None:
    """The gradient is the same object with other memory, then with other values in the same memory."""
    optimizer = make()
    step(optimizer, 0)
    anew = copy.deepcopy(optimizer)
    for t in range(3):
        for index, param in enumerate(params_of(optimizer)):
            gradient, new = param.grad, values(tuple(param.shape), 10 * t + index, param.dtype)
            assert gradient is not None
            kept.append(gradient.data)
            if t == 1:
                gradient.copy_(new)
            else:
                gradient.data = new
        anew = copy.deepcopy(anew)
        for param, other in zip(params_of(optimizer), params_of(anew), strict=True):
            other.grad = param.grad.clone()
        optimizer.step()
        anew.step()
        assert_same(everything(optimizer), everything(anew))


class OwnGradient(Parameter):
    """A parameter whose gradient is found in another place."""

    grad = None  # type: ignore[assignment]


def test_a_type_may_find_its_gradient_elsewhere() -> None:
    own, plain = OwnGradient(values((40, 256), 3)), Parameter(values((40, 256), 3))
    optimizers = [RULES["adamw"].make([param]) for param in (own, plain)]
    for t in range(4):
        for param, optimizer in zip((own, plain), optimizers, strict=True):
            param.grad = None if t == 2 else values((40, 256), 10 + t)
            optimizer.step()
        assert torch.equal(own, plain)
    assert optimizers[0].state[own]["step"] == 3


@pytest.mark.parametrize(
    ("index", "make_bad", "message"),
    [
        (2, Tensor.to_sparse, "got a sparse gradient"),
        (2, Tensor.bfloat16, "got a gradient of torch.bfloat16"),
        (
            1,
            lambda g: torch.full_like(g, torch.inf),
            r"^parameter 1 of param group 0 \(300,\): got a gradient with NaN",
        ),
        (1, None, r"got a gradient of shape \(5,\) on cpu, expected \(300,\)"),
    ],
)
def test_a_bad_gradient_changes_nothing(index: int, make_bad: Callable[[Tensor], Tensor] | None, message: str) -> None:
    """And the next step goes well; also where the parameter had no gradient before."""
    optimizer, expected = make(nonfinite="raise"), make()
    for t in range(4):
        without = (index,) if t == 2 else ()
        step(expected, t, without)
        step(optimizer, t, without)
        before = everything(optimizer)
        param = params_of(optimizer)[index]
        with_gradient(param, make_bad(values(SHAPES[index], 5)) if make_bad else values(SHAPES[index], 5))
        if make_bad is None:
            param.grad.data = torch.zeros(5)
        with pytest.raises((RuntimeError, FloatingPointError), match=message):
            optimizer.step()
        assert_same(everything(optimizer), before)
    assert_same(everything(optimizer), everything(expected))


def negative(gradient: Tensor) -> Tensor:
    """Equal values, whose opposites lie in memory."""
    return torch._neg_view(gradient.neg())


def imaginary(gradient: Tensor) -> Tensor:
    """Equal values as the imaginary parts of conjugates: a negative view, not contiguous."""
    return torch.complex(torch.zeros_like(gradient), -gradient).conj().imag


#: Gradients in the place of plain ones, of the same values but for zeros.
GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": Tensor.clone,
    "wider": Tensor.float,
    "negative": negative,
    "imaginary": imaginary,
    "wrapper": Wrapped,
    "computed": lambda gradient: Scaled(gradient * 2),
    "two": Twice,
    "waiting": AsyncCollectiveTensor,
    "zeros": zeros,
}


@pytest.mark.parametrize(
    ("kinds", "dtype", "offload"),
    [
        (("plain", "wider", "wider", "plain"), BF16, None),
        (("negative",) * 3, FP32, None),
        (("imaginary",) * 3, FP32, "state"),
        (("plain", "negative", "imaginary", "negative"), FP32, None),
        (("plain", "negative", "imaginary", "negative"), FP32, "step"),
        *(((kind,) * 3 + ("plain", kind), FP32, None) for kind in ("wrapper", "computed", "zeros")),
        *((("plain", "plain", kind, "plain", kind), FP32, None) for kind in ("wrapper", "two", "waiting")),
        (("plain", "plain", "zeros", "plain", "zeros"), BF16, None),
    ],
    ids=str,
)
def test_gradients_of_other_kinds(kinds: tuple[str, ...], dtype: torch.dtype, offload: str | None) -> None:
    """From the first step on or later, beside a plain one; new tables are made once at most."""
    with offload_from_cpu(8192):
        optimizer, expected = make(dtype=dtype, offload=offload), make(dtype=dtype)
        with tables_made() as made:
            for t, kind in enumerate(kinds):
                for index, (param, other) in enumerate(zip(params_of(optimizer), params_of(expected), strict=True)):
                    plain = values(tuple(param.shape), 100 * (t + 1) + index, dtype)
                    changed = plain.clone() if index == 1 else GRADIENTS[kind](plain)
                    with_gradient(param, changed)
                    other.grad = torch.zeros_like(plain) if kind == "zeros" and index != 1 else plain
                optimizer.step()
                expected.step()
                optimizer.synchronize()
                assert_same(everything(optimizer), everything(expected))
    assert len(made) == 2


def test_a_gradient_turns_into_a_negative_view_of_the_same_memory() -> None:
    optimizer, expected = make(), make()
    for t in range(4):
        for index, (param, other) in enumerate(zip(params_of(optimizer), params_of(expected), strict=True)):
            gradient = values(tuple(param.shape), 100 * (t + 1) + index, param.dtype)
            other.grad = gradient.clone()
            if param.grad is None:
                param.grad = torch.empty_like(gradient)
            memory = param.grad.detach()
            memory.copy_(gradient)  # writes the opposite of a negative view
            param.grad = torch._neg_view(memory.neg_()) if t % 2 else memory
        optimizer.step()
        expected.step()
        assert_same(everything(optimizer), everything(expected))


@pytest.mark.parametrize("what", ["parameter", "state exp_avg"])
def test_what_is_written_to_is_no_negative_view(what: str) -> None:
    optimizer = make(codec="fp32")
    step(optimizer, 0)
    param = params_of(optimizer)[2]
    if what == "parameter":
        param.data = torch._neg_view(param.data)
    else:
        optimizer.state[param]["exp_avg"] = torch._neg_view(optimizer.state[param]["exp_avg"].clone())
    before = everything(optimizer)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"got a {what} that is a negative view"):
            step(optimizer, 1)
        assert_same(everything(optimizer), before)


def test_a_loss_scale_of_zero_skips_all() -> None:
    """Gradients become Inf or NaN, as in torch's fused kernels."""
    param = Parameter(torch.ones(128))
    param.grad = torch.arange(128.0)
    optimizer = shardopt.AdamW8bit([param])
    optimizer.grad_scale = torch.zeros(())
    optimizer.step()
    assert torch.equal(param.detach(), torch.ones(128))
    assert optimizer.nonfinite_count == 128
