"""Snapshots of all that an optimizer holds, in full on every rank, and their comparison bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ranks.layouts import distribute

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


def snapshot(params: Mapping[str, Tensor], optimizer: Optimizer) -> Snapshot:
    """A copy of the global values of all :func:`entries`; all ranks must call this."""
    return {name: in_full(tensor).clone() for name, tensor in entries(params, optimizer).items()}


def assert_shards_of(got: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Demands that :func:`entries` on this rank are the bits that torch cuts out of the whole ones."""
    shapes = {name: (tuple(x.shape), tuple(whole[name].shape)) for name, x in got.items() if name in whole}
    assert not (wrong := {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}), f"global shapes: {wrong}"
    expected = {name: _part(x, got[name]) if name in got else x for name, x in whole.items()}
    assert_same({name: _local(x) for name, x in got.items()}, expected)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _part(whole: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return whole
    return distribute(whole, like.device_mesh, like.placements).to_local()


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
