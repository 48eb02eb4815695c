"""Snapshots of all that an optimizer holds, in full on every rank, and their comparison bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from ranks.layouts import distribute
from ranks.pickling import from_all_ranks

Snapshot = dict[str, Tensor]


def entries(params: Mapping[str, Tensor], optimizer: Optimizer) -> Snapshot:
    """Every parameter by its name and every state entry as ``name/entry``, as they are: DTensors stay DTensors."""
    found: Snapshot = {}
    for name, param in params.items():
        found[name] = param.detach()
        for entry, value in sorted(optimizer.state[param].items()):
            found[f"{name}/{entry}"] = as_tensor(value)
    return found


def as_tensor(value: Any) -> Tensor:
    """A state entry, or a number that stands for one that is no tensor."""
    return value if isinstance(value, Tensor) else torch.tensor(crc32(repr(value).encode()))


def in_full(tensor: Tensor) -> Tensor:
    """The global value of a tensor; where it is a DTensor, all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def snapshot(params: Mapping[str, Tensor], optimizer: Optimizer, on_all: bool = True) -> Snapshot:
    """A copy on the CPU of the global values of :func:`entries`, on the first rank or all. Replicas must agree."""
    found = entries(params, optimizer)
    sharded = {name: tensor for name, tensor in found.items() if isinstance(tensor, DTensor)}
    if sharded:
        found |= _gathered(sharded, on_all)
    # Host tensors are copied first: waiting for what is on a device would hide a wait that the product lacks.
    copies = {name: tensor.clone() for name, tensor in found.items()}
    return {name: tensor.cpu() for name, tensor in copies.items()}


def _gathered(sharded: Mapping[str, DTensor], on_all: bool) -> Snapshot:
    """The global values of DTensors. One collective for all of them: one for each takes most of a test's time."""
    everyone = from_all_ranks({name: (elements_of(x), x.to_local()) for name, x in sharded.items()}, on_all)
    found: Snapshot = {}
    if not everyone:
        return found
    for name, like in sharded.items():
        whole = torch.zeros(like.shape, dtype=like.dtype)
        known = torch.zeros(like.numel(), dtype=torch.bool)
        for rank, parts in enumerate(everyone):
            if name not in parts:
                continue
            elements, part = parts[name][0].reshape(-1), parts[name][1].reshape(-1)
            before = known[elements]
            there = whole.view(-1)[elements[before]]
            assert torch.equal(_bits(there), _bits(part[before])), f"{name}: rank {rank} has another replica"
            whole.view(-1)[elements] = part
            known[elements] = True
        assert known.all(), f"{name}: no rank has {(~known).sum()} elements of it"
        found[name] = whole
    return found


def elements_of(tensor: DTensor) -> Tensor:
    """The numbers of the elements of this rank's shard in the flattened tensor, in the shard's shape."""
    return _elements(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


@lru_cache(maxsize=1024)
def _elements(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    numbers = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    return distribute(numbers, mesh, placements).to_local()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor; the tensor itself where it is no DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Demands the same names and the same bits."""
    assert list(got) == list(expected), f"got {list(got)}, expected {list(expected)}"
    wrong = [f"{name}: {_difference(got[name], x)}" for name, x in expected.items() if not _same(got[name], x)]
    assert not wrong, f"{len(wrong)} of {len(expected)} differ:\n" + "\n".join(wrong[:20])


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _difference(got: Tensor, expected: Tensor) -> str:
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"got {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    where = (got != expected).nonzero()
    if not len(where):
        return "equal numbers, other bits (signed zeros, NaN)"
    first = tuple(where[0].tolist())
    return f"{len(where)} elements, first at {first}: got {got[first]}, expected {expected[first]}"
