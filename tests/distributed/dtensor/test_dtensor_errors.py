"""Errors of DTensors that cannot be stepped: got, expected, remedy. Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

import shardopt
from ranks.layouts import COLUMN, ROW, WHOLE, Layout, mesh_of, shard, values
from ranks.pool import Pool


def _message(param: Tensor, gradient: Tensor, **options: object) -> str:
    """The error of a step."""
    local = param.to_local() if isinstance(param, DTensor) else param
    before = local.clone()
    param.grad = gradient
    optimizer = shardopt.AdamW8bit([param], **options)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert torch.equal(local, before)
    return str(caught.value)


def _sharded(*placements: object, shape: tuple[int, ...] = (33, 130, 4)) -> DTensor:
    return shard(values(shape, 0), Layout(shape, (2,), placements, torch.float32))


def _partial() -> str:
    param = DTensor.from_local(values((33, 130), 0), mesh_of((2,)), (Partial(),), run_check=False)
    return _message(param, torch.ones_like(param))


def _gradient_on_another_mesh() -> str:
    param = _sharded(ROW)
    other = Layout(tuple(param.shape), (2, 1), (ROW, WHOLE), param.dtype)
    return _message(param, shard(torch.ones(param.shape), other))


def _wrong_part() -> str:
    """A row is missing on each rank."""
    local = values((2 - dist.get_rank(), 130), 0)
    param = DTensor.from_local(local, mesh_of((2,)), (ROW,), run_check=False, shape=(5, 130), stride=(130, 1))
    gradient = DTensor.from_local(local, mesh_of((2,)), (ROW,), run_check=False, shape=(5, 130), stride=(130, 1))
    return _message(param, gradient)


def _plain_gradient() -> str:
    param = _sharded(COLUMN)
    return _message(param, torch.ones(param.shape))


def _plain_state() -> str:
    param = torch.nn.Parameter(_sharded(ROW))
    optimizer = shardopt.AdamW8bit([param])
    for t in range(2):
        param.grad = torch.ones_like(param)
        if t:
            state = optimizer.state[param]
            state["exp_avg_codes"] = state["exp_avg_codes"].to_local().clone()
            before = param.to_local().clone()
            with pytest.raises(RuntimeError) as error:
                optimizer.step()
            assert torch.equal(param.to_local(), before)
            return str(error.value)
        optimizer.step()
    raise AssertionError


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (_plain_state, ["parameter 0 of param group 0", "state exp_avg_codes: got a plain tensor", "load_state_dict"]),
        (_partial, ["Partial", "expected Shard or Replicate", "reduce it"]),
        (_gradient_on_another_mesh, ["got a gradient on", "expected the parameter's mesh"]),
        (_wrong_part, ["got a part of shape", "of a parameter of shape (5, 130)", "pass shape= and stride="]),
        (_plain_gradient, ["got a plain gradient", "wrap it with DTensor.from_local"]),
    ],
)
def test_message(ranks: Pool, function: Callable[[], str], parts: list[str]) -> None:
    for message in ranks.run(2, function):
        assert all(part in message for part in parts), message
