"""DTensors beside ``test_layouts.py``: gradients placed otherwise, strided parts, changes between steps, and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter

import shardopt
import shardopt.layout
from helpers import RULES
from ranks.layouts import COLUMN, DEEP, ROW, WHOLE, Layout, distribute, mesh_of, shard, values
from ranks.models import Matrices, set_gradients
from ranks.pool import Pool
from ranks.snapshot import assert_shards_of, entries, local
from shardopt.optim import ShardedOptimizer

OPTIONS = {"min_quantized_numel": 64, "block_size": 32}
STRIDED = [((97, 130), COLUMN), ((70, 96), COLUMN), ((20, 7, 3, 3), COLUMN), ((97, 130), ROW), ((33, 66), WHOLE)]


class Both:
    """Parameters that are whole and that are sharded, each kind with an optimizer."""

    def __init__(self, ways: Sequence[Layout], rule: str = "adamw", **options: Any) -> None:
        self.ways = ways
        self.models = Matrices(ways), Matrices(ways).sharded()
        self.optimizers = [RULES[rule].make(model.parameters(), **options) for model in self.models]

    def step(self, seed: int) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            set_gradients(model, seed)
            optimizer.step()

    def compare(self) -> None:
        whole, sharded = (
            entries(dict(m.named_parameters()), o) for m, o in zip(self.models, self.optimizers, strict=True)
        )
        assert_shards_of(sharded, whole)


def _ways(*placements: Placement, shape: tuple[int, ...] = (33, 130)) -> list[Layout]:
    return [Layout(shape, (dist.get_world_size(),), (placement,), torch.float32) for placement in placements]


@pytest.mark.ranks(2)
def test_raise_where_one_rank_has_no_gradient() -> None:
    """All ranks look at the same parameters."""
    both = Both([*_ways(ROW), *_ways(ROW, shape=(40, 66))], nonfinite="raise")
    both.step(1)
    first, second = both.models[1].parameters()
    before = [param.to_local().clone() for param in (first, second)]
    first.grad = None if dist.get_rank() else first.grad
    second.grad.to_local()[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="parameter 1 of param group 0"):
        both.optimizers[1].step()
    assert all(torch.equal(a, b.to_local()) for a, b in zip(before, (first, second), strict=True))


@pytest.mark.ranks(4)
def test_state_lies_on_the_parameters_own_mesh() -> None:
    """Not on an equal one that was seen before: its process groups may be gone."""
    for _ in range(2):
        mesh = init_device_mesh("cpu", (2, 2))
        param = distribute(values((33, 130), 0), mesh, (ROW, COLUMN))
        param.grad = torch.ones_like(param)
        optimizer = RULES["adamw"].make([param])
        optimizer.step()
        for value in optimizer.state[param].values():
            assert not isinstance(value, DTensor) or value.device_mesh is mesh


def _placed(gradient: Tensor, way: Layout, placement: Placement) -> DTensor:
    if not placement.is_partial():
        return shard(gradient, way._replace(placements=(placement,)))
    part = torch.zeros_like(gradient) if dist.get_rank() else gradient
    return DTensor.from_local(part, mesh_of(way.mesh), (placement,), run_check=False)


@pytest.mark.ranks(3)
def test_gradients_placed_otherwise_are_redistributed() -> None:
    both = Both([way for shape in ((33, 130), (40, 66), (3, 257)) for way in _ways(ROW, COLUMN, WHOLE, shape=shape)])
    for seed, placement in enumerate((ROW, COLUMN, WHOLE, Partial())):
        set_gradients(both.models[0], seed)
        for whole, param, way in zip(both.models[0].parameters(), both.models[1].parameters(), both.ways, strict=True):
            param.grad = _placed(whole.grad, way, placement)
        for optimizer in both.optimizers:
            optimizer.step()
        both.compare()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_scales_that_change_in_place(default: torch.dtype) -> None:
    """Scales that further pieces of a block are decoded with, too; the default dtype is not that of scales."""
    torch.set_default_dtype(default)
    try:
        both = Both(_ways(DEEP, shape=(5, 7, 40)), "lamb", min_quantized_numel=64)
        for step in range(3):
            both.step(step)
            for optimizer in both.optimizers:
                (state,) = optimizer.state.values()
                local(state["exp_avg_scales"]).mul_(0.5)
        both.compare()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("released", [False, True])
def test_autograd_notices_a_step(released: bool) -> None:
    """As with torch.optim: values that a backward pass still needs are gone, also if it goes on after a release."""
    for placement in (ROW, COLUMN, WHOLE):
        weight = Parameter(distribute(values((64, 66), 0), mesh_of((2,)), (placement,)))
        x = distribute(values((2, 64), 1), mesh_of((2,)), (WHOLE,)).requires_grad_(True)
        optimizer = shardopt.AdamW8bit([weight])
        if released:
            shardopt.release_gradients(nn.ParameterDict({"weight": weight}), optimizer)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                (torch.tanh(x @ weight.detach()) @ weight.T @ weight).sum().backward()
            continue
        for _ in range(3):
            loss = (x @ weight).square().sum()
            loss.backward(retain_graph=True)
            local_part = weight.to_local()
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            local_part.square().sum().backward()  # it shares the memory, and is not the tensor that was stepped
            optimizer.zero_grad()


def _strided(tensor: DTensor) -> DTensor:
    """A DTensor with this rank's part in reversed order of dimensions in memory."""
    part = tensor.to_local()
    dims = tuple(reversed(range(part.dim())))
    part = part.permute(dims).contiguous().permute(dims)
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _assert_contiguous(optimizer: ShardedOptimizer) -> None:
    for state in optimizer.state.values():
        assert all(local(value).is_contiguous() for value in state.values())


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"codec": "log8"}),
        (torch.bfloat16, {"codec": "fp32", "stochastic_rounding": True}),
        (torch.bfloat16, {"codec": "dynamic8", "master_weight_bits": 24}),
    ],
    ids=str,
)
def test_parts_that_are_strided_on_some_ranks(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Rank r's part of parameter p is strided where r + p is even, its gradient's where the step changes that.

    Blocks are cut: the ranks take part in the same exchanges, in the same order.
    """
    rank = dist.get_rank()
    both = Both([way._replace(dtype=dtype) for s, p in STRIDED for way in _ways(p, shape=s)], **OPTIONS, **options)
    parts = both.models[1]
    for index, (name, param) in enumerate(list(parts.named_parameters())):
        parts.register_parameter(name, Parameter(_strided(param.detach())) if (rank + index) % 2 == 0 else param)
    both.optimizers[1] = RULES["adamw"].make(parts.parameters(), **OPTIONS, **options)
    for step in range(3):
        for model, optimizer in zip(both.models, both.optimizers, strict=True):
            set_gradients(model, step)
            for index, param in enumerate(model.parameters()):
                if model is parts and (rank + index + step) % 3 == 0:
                    param.grad = _strided(param.grad)
            optimizer.step()
    both.compare()
    expected, actual = (
        {name: o.full_precision_parameters()[param] for name, param in m.named_parameters()}
        for m, o in zip(both.models, both.optimizers, strict=True)
    )
    assert_shards_of(actual, expected)
    _assert_contiguous(both.optimizers[1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("codec", ["log8", "fp32"])
def test_torch_state_of_strided_parts(codec: str) -> None:
    """torch keeps the moments of a strided part laid out as it is."""
    ways = [way for shape, placement in STRIDED for way in _ways(placement, shape=shape)]
    parts = [Parameter(_strided(shard(values(way.shape, index), way))) for index, way in enumerate(ways)]
    theirs = torch.optim.AdamW(parts, foreach=False)
    for param in parts:
        param.grad = param.detach() * 0.3
    theirs.step()
    assert any(not state["exp_avg"].to_local().is_contiguous() for state in theirs.state.values())
    ours = RULES["adamw"].make(parts, codec=codec, **OPTIONS)
    ours.load_state_dict(theirs.state_dict())
    _assert_contiguous(ours)
    for param in parts if codec == "fp32" else ():
        assert torch.equal(ours.state[param]["exp_avg"].to_local(), theirs.state[param]["exp_avg"].to_local())
    ours.step()


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("gradient", "change"),
    [
        *((gradient, _nothing) for gradient in (_sharded, _replicated, _waiting, _with_new_spec)),
        *((_sharded, change) for change in (_new_spec, _new_local, _new_codes, _new_scales)),
    ],
)
def test_changes(gradient: Gradient, change: Callable[[Any, dict[str, Any]], None]) -> None:
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


def _param(*placements: object, shape: tuple[int, ...] = (33, 130, 4)) -> DTensor:
    return shard(values(shape, 0), Layout(shape, (2,), placements, torch.float32))


def _partial() -> str:
    param = DTensor.from_local(values((33, 130), 0), mesh_of((2,)), (Partial(),), run_check=False)
    return _message(param, torch.ones_like(param))


def _gradient_on_another_mesh() -> str:
    param = _param(ROW)
    other = Layout(tuple(param.shape), (2, 1), (ROW, WHOLE), param.dtype)
    return _message(param, shard(torch.ones(param.shape), other))


def _wrong_part() -> str:
    """A row is missing on each rank."""
    local = values((2 - dist.get_rank(), 130), 0)
    param = DTensor.from_local(local, mesh_of((2,)), (ROW,), run_check=False, shape=(5, 130), stride=(130, 1))
    gradient = DTensor.from_local(local, mesh_of((2,)), (ROW,), run_check=False, shape=(5, 130), stride=(130, 1))
    return _message(param, gradient)


def _plain_gradient() -> str:
    param = _param(COLUMN)
    return _message(param, torch.ones(param.shape))


def _plain_state() -> str:
    param = torch.nn.Parameter(_param(ROW))
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
