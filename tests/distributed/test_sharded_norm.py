"""``clip_grad_norm_`` beside ``test_layouts.py``: parameters on several meshes. More of them: ``test_experts.py``."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import Parameter

import shardopt
from ranks.collectives import counted_collectives
from ranks.layouts import distribute, mesh_of, values
from shardopt import clip_grad_norm_


@pytest.mark.ranks(4)
def test_gradients_that_are_partial_or_on_some_ranks() -> None:
    """And one message for all parameters, as all of these meshes have the same ranks."""
    mesh, square = mesh_of((4,)), mesh_of((2, 2))
    places = [(mesh, (Shard(0),)), (square, (Replicate(), Shard(0))), (square, (Shard(0), Shard(1))), None]
    whole = [Parameter(torch.zeros(97, 130)) for _ in places]
    params = [
        Parameter(p.detach() if place is None else distribute(p.detach(), *place))
        for p, place in zip(whole, places, strict=True)
    ]
    for seed, (param, other, place) in enumerate(zip(params, whole, places, strict=True)):
        other.grad = values((97, 130), 9 + seed)
        param.grad = other.grad.clone() if place is None else distribute(other.grad, *place)
    part = whole[0].grad / 4  # of each rank: their sum is exact for powers of two
    params[0].grad = DTensor.from_local(part.clone(), mesh, (Partial(),))
    total = clip_grad_norm_(params, 0.5)
    assert float(total) == float(clip_grad_norm_(whole, 0.5))
    coefficient = torch.clamp(0.5 / (total + 1e-6), max=1.0)
    assert torch.equal(params[0].grad.to_local(), part * coefficient)
    for param, other in zip(params[1:], whole[1:], strict=True):
        actual = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        assert torch.equal(actual, other.grad)
    own = distribute(whole[0].grad, mesh, (Shard(0),))
    params[0].grad = own if dist.get_rank() == 0 else None
    params[2].grad = None
    for kind, words in ((2.0, shardopt._C.sum_words), (math.inf, 1)):
        clip_grad_norm_(params, 1.0, kind)
        with counted_collectives() as sent:
            actual = clip_grad_norm_(params, 1e9, kind)
        totals = [torch.empty(()) for _ in range(4)]
        dist.all_gather(totals, actual)
        assert len(set(map(float, totals))) == 1
        assert sent == [("allreduce", 8 * words)]


@pytest.mark.ranks(3, timeout=30)
def test_meshes_that_chain() -> None:
    """Ranks 0, 1 and ranks 1, 2: no message reaches all, and all of them refuse."""
    params = []
    for mesh in (DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])):
        param = Parameter(distribute(values((5, 9), 0), mesh, (Shard(0),)))
        if mesh.get_coordinate() is not None:
            param.grad = distribute(values((5, 9), 9), mesh, (Shard(0),))
            params.append(param)
    before = [param.grad.to_local().clone() for param in params]
    for kind in (2.0, math.inf):
        with pytest.raises(RuntimeError, match="expected a mesh with all ranks that share parameters"):
            clip_grad_norm_(params, 0.5, kind)
    assert all(torch.equal(param.grad.to_local(), grad) for param, grad in zip(params, before, strict=True))
