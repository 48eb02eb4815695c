"""Gradients and parameters that change, are of other kinds, or cannot be stepped, with the tables of a step kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Buffer, Parameter

import shardopt
from helpers import RULES, everything, with_gradient
from ranks.layouts import values
from ranks.offload import offload_from_cpu
from ranks.snapshot import assert_same
from step_problem import SHAPES, kept, make, params_of, step, tables_made
from wrappers import Coded, Scaled, Twice, Wrapped, zeros

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
    ("index", "bad", "message"),
    [
        (2, Tensor.to_sparse, "got a sparse gradient"),
        (
            1,
            lambda g: torch.full_like(g, torch.inf),
            r"^parameter 1 of param group 0 \(300,\): got a gradient with NaN",
        ),
        (0, Coded, "parameter 0 of .*: got a tensor of Coded .*cannot be copied.*of codes"),
        (1, torch.zeros(5), r"got a gradient of shape \(5,\) on cpu, expected \(300,\)"),
        (1, torch.zeros(300, dtype=torch.float64), r"\(300,\): got a gradient of torch\.float64, expected"),
    ],
)
def test_a_bad_gradient_changes_nothing(index: int, bad: Tensor | Callable[[Tensor], Tensor], message: str) -> None:
    """And the next step goes well; also where the parameter had no gradient before, or other data in it."""
    optimizer, expected = make(nonfinite="raise"), make()
    for t in range(4):
        without = (index,) if t == 2 else ()
        step(expected, t, without)
        step(optimizer, t, without)
        before = everything(optimizer)
        param = params_of(optimizer)[index]
        gradient = values(SHAPES[index], 5)
        with_gradient(param, gradient if isinstance(bad, Tensor) else bad(gradient))
        if isinstance(bad, Tensor):
            param.grad.data = bad
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


@pytest.mark.parametrize("what", ["parameter", "state exp_avg"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (lambda x: torch._neg_view(x.clone()), "got a {} that is a negative view"),
        (zeros, "parameter 2 of .*: got a {} of a zero tensor, which has no memory"),
    ],
)
def test_what_is_written_to_has_its_values_in_memory(what: str, kind: Callable[[Tensor], Tensor], message: str) -> None:
    optimizer = make(codec="fp32")
    step(optimizer, 0)
    param = params_of(optimizer)[2]
    if what == "parameter":
        param.data = kind(param.data)
    else:
        optimizer.state[param]["exp_avg"] = kind(optimizer.state[param]["exp_avg"])
    before = everything(optimizer)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message.format(what)):
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


# Parameters without memory: wrapper subclasses and zero tensors -------------------------------------------------------


@pytest.mark.parametrize("wrapper", [Scaled, Twice, Coded])
def test_wrappers_of_other_elements_are_refused(wrapper: type[Wrapped]) -> None:
    inner = (param := Parameter(wrapper(values((64, 130), 1))))._tensor.clone()
    optimizer = RULES["adamw"].make([other := Parameter(torch.ones(3)), param])
    param.grad, other.grad = torch.ones(64, 130), torch.ones(3)
    message = rf"^parameter 1 of param group 0 .*: got a tensor of {wrapper.__name__} "
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
    assert torch.equal(param._tensor, inner)
    assert torch.equal(other, torch.ones(3))
    for _ in range(3):  # frozen, as base weights beside adapters
        param.grad, other.grad = None, torch.ones(3)
        optimizer.step()
    assert optimizer.state[other]["step"] == 3


def test_buffers_are_stepped() -> None:
    buffer, param = (kind(values((64, 130), 1)) for kind in (Buffer, Parameter))
    optimizers = [RULES["adamw"].make([tensor]) for tensor in (buffer, param)]
    for t in range(3):
        for optimizer in optimizers:
            step(optimizer, t)
    assert torch.equal(buffer, param)


@pytest.mark.ranks(2)
def test_dtensors_of_wrappers() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes, actual = ((71, 130), (1, 300), (7,)), []

    def shard(whole: Tensor, wrap: Callable[[Tensor], Tensor]) -> DTensor:
        plain = distribute_tensor(whole, mesh, [Shard(0)])
        return DTensor(wrap(plain.to_local()), plain._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    for wrap, zero in ((Wrapped, zeros), (Tensor.clone, torch.zeros_like)):
        params: list[Any] = [Parameter(shard(values(shape, i), wrap)) for i, shape in enumerate(shapes)]
        optimizer = shardopt.AdamW8bit(params, lr=0.01)
        for t in range(7):
            for i, param in enumerate(params):
                param.grad = shard(values(shapes[i], 10 * t + i), (wrap, Tensor.clone, zero)[t % 3])
            if t == 4 and wrap is Wrapped:
                local = params[0]._local_tensor
                local._tensor = local._tensor.clone()
            optimizer.step()
        found = [getattr(param._local_tensor, "_tensor", param._local_tensor) for param in params]
        for param in params:
            state = optimizer.state[param]
            found += [state[key].to_local() for key in sorted(state.keys() - {"step"})]
        actual.append(found)
    for got, expected in zip(*actual, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.ranks(2)
def test_a_dtensor_of_another_dtype_than_its_part_is_refused() -> None:
    """In the first step, and between steps."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for steps in (0, 1):
        param: Any = Parameter(distribute_tensor(values((71, 130), 1, BF16), mesh, [Shard(0)]))
        optimizer = shardopt.AdamW8bit([param], lr=0.01)
        for _ in range(steps):
            param.grad = torch.ones_like(param)
            optimizer.step()
        before, param.grad = param.to_local().clone(), None
        param.data = param.data.float()
        param.grad = torch.ones_like(param, dtype=FP32)
        with pytest.raises(RuntimeError, match=r"got a parameter of torch.float32 .* whose part is of torch.bfloat16"):
            optimizer.step()
        assert torch.equal(param._local_tensor, before)
