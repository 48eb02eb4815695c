"""DTensors beside ``test_layouts.py``: gradients placed otherwise, strided parts, changes between steps, and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter

import shardopt
import shardopt.layout
from helpers import RULES
from ranks.layouts import COLUMN, ROW, WHOLE, Layout, distribute, mesh_of, shard, values
from ranks.models import Matrices, set_gradients
from ranks.snapshot import assert_same, entries, in_full, local, snapshot
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
        both = zip(self.models, self.optimizers, strict=True)
        expected, got = (snapshot(dict(model.named_parameters()), optimizer) for model, optimizer in both)
        assert_same(got, expected)


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
def test_autograd_notices_a_step() -> None:
    """As with torch.optim: values that a backward pass still needs are gone."""
    for placement in (ROW, COLUMN, WHOLE):
        weight = Parameter(distribute(values((64, 66), 0), mesh_of((2,)), (placement,)))
        x = distribute(values((2, 64), 1), mesh_of((2,)), (WHOLE,)).requires_grad_(True)
        optimizer = shardopt.AdamW8bit([weight])
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


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"codec": "log8"}),
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
        {name: in_full(o.full_precision_parameters()[param]) for name, param in m.named_parameters()}
        for m, o in zip(both.models, both.optimizers, strict=True)
    )
    assert_same(actual, expected)
    assert all(local(x).is_contiguous() for state in both.optimizers[1].state.values() for x in state.values())


SHAPE = (71, 130)
CHANGED_AT = 3


def _sharded(seed: int) -> DTensor:
    return distribute(values(SHAPE, seed), mesh_of((dist.get_world_size(),)), (ROW,))


def _waiting(gradient: DTensor) -> DTensor:
    """The local tensor waits for a collective, of this rank alone."""
    local = funcol.all_reduce(gradient.to_local(), "sum", mesh_of((dist.get_world_size(), 1)).get_group(1))
    assert isinstance(local, AsyncCollectiveTensor)
    return DTensor(local, gradient._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _with_spec(tensor: Any, placements: tuple[Placement, ...] | None = None) -> Any:
    spec = tensor._spec
    tensor._spec = DTensorSpec(spec.mesh, placements or spec.placements, tensor_meta=spec.tensor_meta)
    return tensor


def _with_local(tensor: Any, change: Callable[[Tensor], Tensor]) -> None:
    tensor._local_tensor = change(tensor._local_tensor)


#: Changes inside of DTensors between two steps: of the gradient, or of the parameter and its state.
CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, dict[str, Any]], object]]] = {
    "waiting gradient": (_waiting, lambda param, state: None),
    "spec": (_with_spec, lambda param, state: _with_spec(param)),
    "local parameter": (lambda gradient: gradient, lambda param, state: _with_local(param, lambda x: x * 2)),
    "local codes": (
        lambda gradient: gradient,
        lambda param, state: _with_local(state["exp_avg_codes"], lambda x: x.roll(1, 0)),
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name: str) -> None:
    """Compares with an optimizer that loads its state, and so makes its tables anew, before every step."""
    of_gradient, change = CHANGES[name]
    found = []
    for loads in (False, True):
        param = Parameter(_sharded(1))
        optimizer = shardopt.AdamW8bit([param], lr=0.01)
        for t in range(6):
            if t == CHANGED_AT:
                change(param, optimizer.state[param])
            gradient = _sharded(10 + t)
            param.grad = of_gradient(gradient) if t >= CHANGED_AT else gradient
            if loads:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        found.append({key: local(value) for key, value in entries({"param": param}, optimizer).items()})
    assert_same(*found)


def _refused(optimizer: ShardedOptimizer, message: str) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    before = param._local_tensor.clone()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert torch.equal(param._local_tensor, before)


@pytest.mark.ranks(2)
def test_refused() -> None:
    """In the first step, and in a later one."""
    mesh, whole = mesh_of((2,)), values((33, 130, 4), 0)
    partial = DTensor.from_local(values((33, 130), 0), mesh, (Partial(),), run_check=False)
    lacking = values((2 - dist.get_rank(), 130), 0)  # a row on each rank
    wrong = DTensor.from_local(lacking, mesh, (ROW,), run_check=False, shape=(5, 130), stride=(130, 1))
    elsewhere = distribute(whole, mesh_of((2, 1)), (ROW, WHOLE))
    cases = [
        (partial, partial, "Partial.* expected Shard or Replicate.* reduce it"),
        (distribute(whole, mesh, (ROW,)), elsewhere, "got a gradient on .* expected the parameter's mesh"),
        (wrong, wrong, r"got a part of shape .* of a parameter of shape \(5, 130\).* pass shape= and stride="),
        (distribute(whole, mesh, (COLUMN,)), whole, r"got a plain gradient.* wrap it with DTensor\.from_local"),
    ]
    for param, gradient, message in cases:
        param.grad = gradient.clone()
        _refused(shardopt.AdamW8bit([param]), message)
    spoilt: dict[str, Callable[[Any, dict[str, Any]], object]] = {
        "parameter 0 of param group 0.* state exp_avg_codes: got a plain tensor.* load_state_dict": (
            lambda param, state: state.update(exp_avg_codes=local(state["exp_avg_codes"]).clone())
        ),
        "got a part of shape": lambda param, state: _with_spec(param, (WHOLE,)),
    }
    for message, spoil in spoilt.items():
        param = Parameter(_sharded(1))
        optimizer = shardopt.AdamW8bit([param])
        for t in range(2):
            param.grad = _sharded(t)
            optimizer.step()
        spoil(param, optimizer.state[param])
        _refused(optimizer, message)
