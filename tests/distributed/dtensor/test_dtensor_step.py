"""Steps of DTensors beside those of ``test_layouts.py``: gradients placed otherwise, parts that are strided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import shardopt
from helpers import RULES, everything
from ranks.layouts import COLUMN, DEEP, ROW, WHOLE, Layout, distribute, mesh_of, shard, values
from ranks.models import Matrices, set_gradients
from ranks.snapshot import assert_same, assert_shards_of, entries, local
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


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", [ROW, COLUMN])
def test_nonfinite_elements_are_counted_where_they_are(placement: Placement) -> None:
    both = Both(_ways(placement), nonfinite="skip")
    (whole,), (sharded,) = (list(model.parameters()) for model in both.models)
    whole.grad = torch.ones(33, 130)
    whole.grad[5, 3] = torch.nan
    whole.grad[5, 4] = torch.inf
    sharded.grad = shard(whole.grad, both.ways[0])
    for optimizer in both.optimizers:
        optimizer.step()
    both.compare()
    assert [optimizer.nonfinite_count for optimizer in both.optimizers] == [2, 2 if dist.get_rank() == 0 else 0]


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
        *((torch.float32, {"codec": codec}) for codec in ("log8", "dynamic8", "fp32")),
        *((torch.bfloat16, options) for options in ({"master_weight_bits": 24}, {"stochastic_rounding": True})),
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


def _convolutions() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 33, 3, padding=1), nn.ReLU(), nn.Conv2d(33, 12, 3))
    return model.to(memory_format=torch.channels_last)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("views", [False, True])
def test_channels_last_under_ddp(views: bool, released: bool) -> None:
    """As contiguous copies of the parameters with the same gradients."""
    replica = DistributedDataParallel(_convolutions(), gradient_as_bucket_view=views)
    params = list(replica.parameters())
    optimizer = RULES["adamw"].make(params, **OPTIONS)
    copies = [Parameter(param.detach().contiguous()) for param in params]
    expected = RULES["adamw"].make(copies, **OPTIONS)
    gradients: dict[Tensor, Tensor] = {}
    for param in params:  # released gradients are gone after the backward pass
        param.register_hook(lambda gradient, param=param: gradients.__setitem__(param, gradient.clone()))
    if released:
        shardopt.release_gradients(replica, optimizer)
    for number in range(3):
        images = values((4, 3, 8, 8), 10 * number + dist.get_rank()).contiguous(memory_format=torch.channels_last)
        replica(images).square().mean().backward()
        for param, copied in zip(params, copies, strict=True):
            copied.grad = gradients[param].mul_(1.0 / dist.get_world_size()).contiguous()
            dist.all_reduce(copied.grad)
            assert released or torch.equal(param.grad, copied.grad)
        optimizer.step()
        optimizer.zero_grad()
        expected.step()
        assert_same(everything(optimizer), everything(expected))
    assert not params[0].is_contiguous()
