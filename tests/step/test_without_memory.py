"""Steps of tensors without memory, wrapper subclasses and zero tensors, have the bits of ordinary tensors' steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Buffer, Parameter

import shardopt
from helpers import RULES, everything
from ranks.layouts import values
from ranks.offload import offload_from_cpu
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from step_problem import SHAPES, kept, make, params_of, step, tables_made
from wrappers import Coded, Scaled, Twice, Wrapped, zeros

FP32, BF16 = torch.float32, torch.bfloat16


def wrapped(rule: str = "adamw", dtype: torch.dtype = FP32, **options: Any) -> ShardedOptimizer:
    """The optimizer of :func:`step_problem.make`, all of whose parameters are wrappers but one."""
    params = [Parameter(values(shape, i, dtype)) for i, shape in enumerate(SHAPES)]
    params = [p if i == 2 else Parameter(Wrapped(p.detach())) for i, p in enumerate(params)]
    return RULES[rule].make([{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}], **options)


def assert_alike(optimizer: ShardedOptimizer, expected: ShardedOptimizer) -> None:
    for param, other in zip(params_of(optimizer), params_of(expected), strict=True):
        assert torch.equal(getattr(param, "_tensor", param), other)
        assert_same(optimizer.state[param], expected.state[other])


@pytest.mark.parametrize(
    ("rule", "dtype", "options"),
    [
        ("adamw", FP32, {}),
        ("adamw", BF16, {"master_weight_bits": 24}),
        ("lamb", FP32, {}),
        ("prodigy", FP32, {}),
        ("adamw", FP32, {"offload": "step"}),
    ],
)
def test_wrapped_parameters(rule: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Also when one gets another inner tensor."""
    with offload_from_cpu(8192), tables_made() as made:
        optimizer, expected = wrapped(rule, dtype, **options), make(rule, dtype, **options)
        for t in range(6):
            if t == 3 and rule == "adamw" and not options:
                param: Any = params_of(optimizer)[0]
                kept.append(param._tensor)
                before = param._tensor.clone()
                param._tensor = param._tensor * 2
                params_of(expected)[0].data.mul_(2)
            step(optimizer, t)
            step(expected, t)
            assert_alike(optimizer, expected)
    if rule == "adamw" and not options:
        assert torch.equal(kept[-1], before)
        assert len(made) == 3
    else:
        assert len(made) == 2


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


def test_a_gradient_that_cannot_be_copied_is_refused() -> None:
    optimizer = make()
    for t in range(2):
        before = everything(optimizer)
        param = params_of(optimizer)[0]
        param.grad = Coded(torch.ones(param.shape))
        message = r"parameter 0 of .*: got a tensor of Coded .*cannot be copied.*of codes"
        with pytest.raises(RuntimeError, match=message):
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
