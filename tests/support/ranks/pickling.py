"""Pickles whose tensors are bytes: torch makes an archive of each, which takes half a millisecond to read."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided
        if not is_plain or value.requires_grad or value.is_neg() or value.is_conj() or not value.is_contiguous():
            return NotImplemented
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def dumps(value: object) -> bytes:
    """As ``pickle.dumps``; tensors that share memory come back with memory of their own each."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def from_all_ranks(value: object, on_all: bool = True) -> list[Any]:
    """All ranks' values, by rank; nothing on ranks but the first, unless on all. All ranks must call this."""
    everyone: list[Any] = [None] * dist.get_world_size() if on_all or dist.get_rank() == 0 else []
    if on_all:
        dist.all_gather_object(everyone, dumps(value))
    else:
        dist.gather_object(dumps(value), everyone or None)
    return [pickle.loads(each) for each in everyone]
