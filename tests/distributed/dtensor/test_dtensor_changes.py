"""Steps of DTensors whose tables are cached notice whatever changes between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

import shardopt
import shardopt.layout
from ranks.layouts import values
from ranks.pool import Pool

SHAPE = (71, 130)
CHANGED_AT = 3
Gradient = Callable[[Tensor, DeviceMesh], DTensor]


def _sharded(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(whole, mesh, [Shard(0)])


def _replicated(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(whole, mesh, [Replicate()])


def _waiting(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """The local tensor waits for a collective, of this rank alone."""
    sharded = _sharded(whole, mesh)
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1)).get_group(1)
    local = funcol.all_reduce(sharded.to_local(), "sum", alone)
    assert isinstance(local, AsyncCollectiveTensor)
    return DTensor(local, sharded._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _with_new_spec(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    gradient = _sharded(whole, mesh)
    gradient._spec = _copy(gradient._spec)
    return gradient


def _copy(spec: DTensorSpec, placements: tuple[Placement, ...] | None = None) -> DTensorSpec:
    return DTensorSpec(spec.mesh, placements or spec.placements, tensor_meta=spec.tensor_meta)


def _new_spec(param: Any, state: dict[str, Any]) -> None:
    param._spec = _copy(param._spec)


def _new_local(param: Any, state: dict[str, Any]) -> None:
    param._local_tensor = param._local_tensor * 2


def _new_codes(param: Any, state: dict[str, Any]) -> None:
    codes = state["exp_avg_codes"]
    codes._local_tensor = codes._local_tensor.roll(1, 0)


def _new_scales(param: Any, state: dict[str, Any]) -> None:
    state["exp_avg_sq_scales"] = state["exp_avg_sq_scales"].clone() * 2


def _nothing(param: Any, state: dict[str, Any]) -> None:
    pass


def _run(gradient: Gradient, change: Callable[[Any, dict[str, Any]], None]) -> None:
    """Compares with an optimizer that makes its tables anew in every step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    actual = []
    for forgets in (False, True):
        param = nn.Parameter(_sharded(values(SHAPE, 1, torch.float32), mesh))
        optimizer = shardopt.AdamW8bit([param], lr=0.01)
        for t in range(6):
            if t == CHANGED_AT:
                change(param, optimizer.state[param])
            param.grad = (gradient if t >= CHANGED_AT else _sharded)(values(SHAPE, 10 + t, torch.float32), mesh)
            if forgets:
                optimizer._internals.forget_tables()
            optimizer.step()
        state = optimizer.state[param]
        actual.append([param.to_local(), *(state[key].to_local() for key in sorted(state.keys() - {"step"}))])
    for got, expected in zip(*actual, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("gradient", [_sharded, _replicated, _waiting, _with_new_spec])
def test_gradients(ranks: Pool, gradient: Gradient) -> None:
    ranks.run(2, _run, gradient, _nothing)


@pytest.mark.parametrize("change", [_new_spec, _new_local, _new_codes, _new_scales])
def test_changes(ranks: Pool, change: Callable[[Any, dict[str, Any]], None]) -> None:
    ranks.run(2, _run, _sharded, change)


@pytest.mark.ranks(2)
def test_a_layout_that_is_none_of_the_local_tensor_is_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param: Any = nn.Parameter(_sharded(values(SHAPE, 1, torch.float32), mesh))
    optimizer = shardopt.AdamW8bit([param], lr=0.01)
    for t in range(2):
        param.grad = _sharded(values(SHAPE, t, torch.float32), mesh)
        optimizer.step()
    before = param.to_local().clone()
    param._spec = _copy(param._spec, (Replicate(),))
    with pytest.raises(RuntimeError, match="got a part of shape"):
        optimizer.step()
    assert torch.equal(param._local_tensor, before)


@pytest.mark.ranks(2)
def test_a_cached_step_calls_nothing_per_tensor() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [nn.Parameter(_sharded(values(SHAPE, i, torch.float32), mesh)) for i in range(3)]
    optimizer = shardopt.AdamW8bit(params, lr=0.01)
    calls = 0
    shard = type(shardopt.layout.shard_of(params[0]))
    saved = shard.local, shard.local_gradient

    def counted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(self: Any, tensor: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return function(self, tensor)

        return call

    for t in range(4):
        for i, param in enumerate(params):
            param.grad = _sharded(values(SHAPE, 10 * t + i, torch.float32), mesh)
            param.grad._spec = param._spec  # as FSDP2 makes it
        if t == 2:
            shard.local, shard.local_gradient = map(counted, saved)
        optimizer.step()
    shard.local, shard.local_gradient = saved
    assert calls == 0
