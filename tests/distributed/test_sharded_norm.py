"""``clip_grad_norm_`` beside ``test_layouts.py``: parameters on several meshes, of which some lack ranks."""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardopt
from ranks.collectives import counted_collectives
from ranks.layouts import Layout, distribute, mesh_of, shard, values
from shardopt import clip_grad_norm_


@pytest.mark.ranks(4)
def test_mixed() -> None:
    """Parameters on several meshes, plain ones, partial gradients, gradients on some ranks; what is sent is counted."""
    size = dist.get_world_size()
    layouts = [
        Layout((97, 130), (size,), (Shard(0),), torch.float32),
        Layout((3, 257), (size,), (Shard(1),), torch.bfloat16),
        Layout((33, 31), (2, size // 2), (Replicate(), Shard(0)), torch.float32),
        Layout((70, 96), (2, size // 2), (Shard(0), Shard(1)), torch.float32),
        Layout((1, 40), (2, size // 2), (Replicate(), Replicate()), torch.float16),
    ]
    whole = [torch.nn.Parameter(values(layout.shape, 0, layout.dtype)) for layout in layouts]
    whole += [torch.nn.Parameter(torch.ones(7)), torch.nn.Parameter(torch.ones(5))]
    params = [torch.nn.Parameter(shard(p.detach(), layout)) for p, layout in zip(whole, layouts, strict=False)]
    params += [torch.nn.Parameter(p.detach().clone()) for p in whole[len(params) :]]
    for seed, (param, other) in enumerate(zip(params, whole, strict=True)):
        other.grad = values(tuple(other.shape), 9 + seed, other.dtype)
        param.grad = shard(other.grad.clone(), layouts[seed]) if isinstance(param, DTensor) else other.grad.clone()
    there = params[0].grad.to_local()
    params[0].grad = shard(whole[0].grad / 4, layouts[0]._replace(placements=(Replicate(),)))
    params[0].grad = DTensor.from_local(params[0].grad.to_local(), mesh_of((size,)), (Partial(),))
    whole[0].grad *= size / 4  # the sum of the partial gradients, exact for powers of two
    before, wanted = params[0].grad.to_local().clone(), clip_grad_norm_(whole, 0.5)
    total = clip_grad_norm_(params, 0.5)
    assert float(total) == float(wanted)
    coefficient = torch.clamp(0.5 / (total + 1e-6), max=1.0)
    assert torch.equal(params[0].grad.to_local(), before * coefficient)
    for param, other in zip(params[1:], whole[1:], strict=True):
        actual = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        assert torch.equal(actual, other.grad)
    params[0].grad = params[3].grad = None
    if dist.get_rank() == 0:
        params[0].grad = DTensor.from_local(there, mesh_of((size,)), (Shard(0),), shape=(97, 130), stride=(130, 1))
    for kind, words in ((2.0, shardopt._C.sum_words), (math.inf, 1)):
        clip_grad_norm_(params, 1.0, kind)
        with counted_collectives() as sent:
            actual = clip_grad_norm_(params, 1e9, kind)
        totals = [torch.empty(()) for _ in range(size)]
        dist.all_gather(totals, actual)
        assert len(set(map(float, totals))) == 1
        # All of these meshes have the same ranks.
        assert sent == [("allreduce", 8 * words)]


@lru_cache(maxsize=1)
def _submeshes() -> dict[tuple[int, ...], DeviceMesh]:
    ranks = [(0, 1), (1, 2), (0, 1, 2), (2, 3), (3,)]  # all ranks make all of these
    return {of_mesh: DeviceMesh("cpu", list(of_mesh)) for of_mesh in ranks if max(of_mesh) < dist.get_world_size()}


def _on(mesh: DeviceMesh, seed: int) -> torch.nn.Parameter:
    """A parameter of 5 rows on a mesh, with a gradient."""
    param = torch.nn.Parameter(distribute(values((5, 9), seed), mesh, (Shard(0),)))
    if mesh.get_coordinate() is not None:
        param.grad = distribute(values((5, 9), 9 + seed), mesh, (Shard(0),))
    return param


#: Ranks, meshes (by the first's ranks, or "ep": a slice of a mesh for each half of the ranks), a plain parameter.
_SETS: list[tuple[int, list[tuple[int, ...] | str], bool]] = [
    (3, [(0, 1, 2), (1, 2)], False),  # the first copy is not on rank 0
    (4, ["world", (2, 3), (3,), (0, 1)], True),
    (4, ["world", "ep", (2, 3)], True),
    (4, [(0, 1), (2, 3)], True),  # no mesh has all ranks, all ranks know of both
    (3, [(0, 1)], True),  # rank 2 has a copy of the plain parameter only
    (3, [(0, 1, 2), (0, 1), (1, 2)], False),
]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [3, 4])
def test_meshes_of_some_ranks(world_size: int) -> None:
    """Parameters on meshes that lack some ranks, which leave them out or have them without elements."""
    for case in _SETS:
        for empty in (True, False):
            # A rank cannot know of parameters that it leaves out, and shares no other parameter with.
            if case[0] == world_size and (empty or case not in _SETS[3:5]):
                _clip(*case, empty)


def _clip(world_size: int, sets: list[tuple[int, ...] | str], plain: bool, empty: bool) -> None:
    pairs = mesh_of((2, 2), "dp", "ep")["ep"] if "ep" in sets else None
    meshes = {"world": mesh_of((world_size,)), "ep": pairs}
    params, grads = [], []
    for seed, of_mesh in enumerate(sets):
        mesh = meshes[of_mesh] if isinstance(of_mesh, str) else _submeshes()[of_mesh]
        grads.append(values((5, 9), 9 + seed))
        if empty or mesh.get_coordinate() is not None:
            params.append(_on(mesh, seed))
    if plain:
        params.append(torch.nn.Parameter(torch.ones(7)))
        params[-1].grad = values((7,), 3)
        grads.append(values((7,), 3))
    whole = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for kind in (2.0, math.inf):
        for param, grad in zip(whole, grads, strict=True):
            param.grad = grad.clone()
        optimizer = shardopt.AdamW8bit(params)
        assert float(clip_grad_norm_(params, 0.5, kind, optimizer=optimizer)) == float(
            clip_grad_norm_(whole, 0.5, kind)
        )


@pytest.mark.ranks(3, timeout=30)
def test_meshes_that_chain() -> None:
    """Ranks 0, 1 and ranks 1, 2: no message reaches all, and all of them refuse."""
    rank, meshes = dist.get_rank(), _submeshes()
    params = [_on(mesh, seed) for seed, mesh in enumerate((meshes[0, 1], meshes[1, 2])) if rank in mesh.mesh.tolist()]
    before = [param.grad.to_local().clone() for param in params]
    for kind in (2.0, math.inf):
        with pytest.raises(RuntimeError, match="expected a mesh with all ranks that share parameters"):
            clip_grad_norm_(params, 0.5, kind)
    assert all(torch.equal(param.grad.to_local(), grad) for param, grad in zip(params, before, strict=True))
