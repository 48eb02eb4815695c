"""Steps of tensors without memory, wrapper subclasses and zero tensors, have the bits of ordinary tensors' steps."""

from __future__ import annotations

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
from helpers import RULES, everything
from ranks.layouts import values
from ranks.offload import offload_from_cpu
from ranks.pool import Pool
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from shardopt.step import stepper
from step_problem import SHAPES, kept, make, params_of, step
from wrappers import Coded, Scaled, Twice, Wrapped, zeros

Made = list[int]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Counts the tables that are made."""
    numbers: Made = []
    original = stepper.Stepper._make_tables

    def make_tables(*args: Any) -> Any:
        numbers.append(len(numbers))
        return original(*args)

    monkeypatch.setattr(stepper.Stepper, "_make_tables", make_tables)
    return numbers


def wrapped(rule: str = "adamw", dtype: torch.dtype = torch.float32, **options: Any) -> ShardedOptimizer:
    """The optimizer of :func:`step_problem.make`, all of whose parameters are wrappers but one."""
    params = [Parameter(values(shape, i, dtype)) for i, shape in enumerate(SHAPES)]
    params = [p if i == 2 else Parameter(Wrapped(p.detach())) for i, p in enumerate(params)]
    return RULES[rule].make([{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}], **options)


def elements(optimizer: ShardedOptimizer) -> list[Tensor]:
    return [getattr(param, "_tensor", param).detach() for param in params_of(optimizer)]


def assert_alike(optimizer: ShardedOptimizer, expected: ShardedOptimizer) -> None:
    for got, wanted in zip(elements(optimizer), elements(expected), strict=True):
        assert torch.equal(got, wanted)
    for param, other in zip(params_of(optimizer), params_of(expected), strict=True):
        assert_same(optimizer.state[param], expected.state[other])


@pytest.mark.parametrize(
    ("rule", "dtype", "options"),
    [
        ("adamw", torch.float32, {}),
        ("adamw", torch.bfloat16, {"master_weight_bits": 24}),
        ("lamb", torch.float32, {}),
        ("prodigy", torch.float32, {}),
        ("adamw", torch.float32, {"offload": "step"}),
    ],
)
def test_wrapped_parameters(rule: str, dtype: torch.dtype, options: dict[str, Any], made: Made) -> None:
    with offload_from_cpu(8192):
        optimizer, expected = wrapped(rule, dtype, **options), make(rule, dtype, **options)
        for t in range(5):
            step(optimizer, t)
            step(expected, t)
            assert_alike(optimizer, expected)
    assert len(made) == 2


def test_a_wrapper_that_gets_another_inner_tensor(made: Made) -> None:
    optimizer, expected = wrapped(), make()
    for t in range(6):
        if t == 3:
            param: Any = params_of(optimizer)[0]
            kept.append(param._tensor)
            param._tensor = param._tensor * 2
            before = kept[-1].clone()
            params_of(expected)[0].data.mul_(2)
        step(optimizer, t)
        step(expected, t)
        assert_alike(optimizer, expected)
    assert torch.equal(kept[-1], before)
    assert len(made) == 3


@pytest.mark.parametrize("wrapper", [Scaled, Twice, Coded])
def test_wrappers_of_other_elements_are_refused(wrapper: type[Wrapped]) -> None:
    data = values((64, 130), 1, torch.float32)
    inner = (param := Parameter(wrapper(data)))._tensor.clone()
    optimizer = RULES["adamw"].make([other := Parameter(torch.ones(3)), param])
    param.grad, other.grad = torch.ones(64, 130), torch.ones(3)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=rf"^parameter 1 of param group 0 .*: got a tensor of {wrapper.__name__} "
        ):
            optimizer.step()
    assert torch.equal(param._tensor, inner)
    assert torch.equal(other, torch.ones(3))
    for _ in range(3):  # frozen, as base weights beside adapters
        param.grad, other.grad = None, torch.ones(3)
        optimizer.step()
    assert optimizer.state[other]["step"] == 3


def test_buffers_are_stepped() -> None:
    buffer, param = (kind(values((64, 130), 1, torch.float32)) for kind in (Buffer, Parameter))
    optimizers = [RULES["adamw"].make([tensor]) for tensor in (buffer, param)]
    for t in range(3):
        for optimizer in optimizers:
            step(optimizer, t)
    assert torch.equal(buffer, param)


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "wrapper": Wrapped,
    "computed": lambda gradient: Scaled(gradient * 2),
    "two": Twice,
    "waiting": AsyncCollectiveTensor,
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("first", [0, 2])
def test_wrapped_gradients(kind: str, first: int, made: Made) -> None:
    optimizer, expected = make(), make()
    for t in range(5):
        step(expected, t)
        for index, param in enumerate(params_of(optimizer)):
            gradient = values(tuple(param.shape), 100 * (t + 1) + index, param.dtype)
            param.grad = GRADIENTS[kind](gradient) if t >= first and index != 1 else gradient
        optimizer.step()
        assert_same(everything(optimizer), everything(expected))
    assert len(made) == 2


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_gradients(first: int, dtype: torch.dtype, made: Made) -> None:
    optimizer, expected = make(dtype=dtype), make(dtype=dtype)
    for t in range(5):
        for param, other in zip(params_of(optimizer), params_of(expected), strict=True):
            is_zero = t >= first and t != 3
            param.grad = zeros(param) if is_zero else torch.ones_like(param)
            other.grad = torch.zeros_like(other) if is_zero else torch.ones_like(other)
        optimizer.step()
        expected.step()
        assert_same(everything(optimizer), everything(expected))
    assert len(made) == 2


def test_a_gradient_that_cannot_be_copied_is_refused() -> None:
    optimizer = make()
    for t in range(2):
        before = everything(optimizer)
        param = params_of(optimizer)[0]
        param.grad = Coded(torch.ones(param.shape))
        with pytest.raises(
            RuntimeError, match=r"parameter 0 of .*: got a tensor of Coded .*cannot be copied.*of codes"
        ):
            optimizer.step()
        param.grad = None
        assert_same(everything(optimizer), before)
        step(optimizer, t)


@pytest.mark.parametrize("what", ["parameter", "state exp_avg"])
def test_zero_tensors_are_not_written(what: str) -> None:
    optimizer = make(codec="fp32")
    step(optimizer, 0)
    param = params_of(optimizer)[0]
    if what == "parameter":
        param.data = zeros(param)
    else:
        optimizer.state[param]["exp_avg"] = zeros(param)
    with pytest.raises(RuntimeError, match=rf"parameter 0 of .*: got a {what} of a zero tensor, which has no memory"):
        step(optimizer, 1)


def _sharded() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(whole: Tensor, wrap: Callable[[Tensor], Tensor] = Tensor.clone) -> DTensor:
        plain = distribute_tensor(whole, mesh, [Shard(0)])
        return DTensor(wrap(plain.to_local()), plain._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    shapes = ((71, 130), (1, 300), (7,))
    actual = []
    for wrap in (Wrapped, Tensor.clone):
        params: list[Any] = [Parameter(shard(values(shape, i, torch.float32), wrap)) for i, shape in enumerate(shapes)]
        optimizer = shardopt.AdamW8bit(params, lr=0.01)
        for t in range(7):
            for i, param in enumerate(params):
                whole = values(shapes[i], 10 * t + i, torch.float32)
                kinds = (
                    [Wrapped, Tensor.clone, zeros]
                    if wrap is Wrapped
                    else [Tensor.clone, Tensor.clone, torch.zeros_like]
                )
                param.grad = shard(whole, kinds[t % 3])
            if t == 4:
                local = params[0]._local_tensor
                if wrap is Wrapped:
                    local._tensor = local._tensor.clone()
            optimizer.step()
        locals_ = [getattr(param._local_tensor, "_tensor", param._local_tensor) for param in params]
        states = [optimizer.state[param] for param in params]
        actual.append(
            [*locals_, *(state[key].to_local() for state in states for key in sorted(state.keys() - {"step"}))]
        )
    for got, expected in zip(*actual, strict=True):
        assert torch.equal(got, expected)


def test_dtensors_of_wrappers(ranks: Pool) -> None:
    ranks.run(2, _sharded)


def _other_dtype() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param: Any = Parameter(distribute_tensor(values((71, 130), 1, torch.bfloat16), mesh, [Shard(0)]))
    optimizer = shardopt.AdamW8bit([param], lr=0.01)
    for cached in (False, True):
        if cached:
            param.grad = torch.ones_like(param)
            optimizer.step()
        before, data = param.to_local().clone(), param.data
        param.grad = None
        param.data = param.data.float()
        param.grad = torch.ones_like(param, dtype=torch.float32)
        with pytest.raises(RuntimeError, match=r"got a parameter of torch.float32 .* whose part is of torch.bfloat16"):
            optimizer.step()
        assert torch.equal(param._local_tensor, before)
        param.grad = None
        param.data = data


def test_a_dtensor_of_another_dtype_than_its_part_is_refused(ranks: Pool) -> None:
    ranks.run(2, _other_dtype)
