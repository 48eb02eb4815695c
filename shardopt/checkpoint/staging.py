"""Copies of tensors in host memory, which are written while training goes on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from shardopt.checkpoint.chunks import Chunks

_ALIGNMENT = 64  # bytes


class Stager(AsyncStager):
    """Copies tensors, in :class:`Chunks` or plain, for ``dcp.async_save``, whose own stager cannot copy chunks.

    All copies lie in one staging buffer, which the next :meth:`stage` uses again: the system clears each page of new
    memory on first touch, which takes several times as long as copying. The buffer grows when more memory is needed.

    Attributes:
        in_use: whether a save reads the copies; the owner of the stager sets and clears this flag.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._end = 0
        self.in_use = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies tensors over the earlier copies.

        Raises:
            TypeError: a value is no tensor.
        """
        tensors = {name: _chunks(name, value) for name, value in state_dict.items()}
        size = sum(_room(tensor) for chunks in tensors.values() for tensor in chunks.written.values())
        self._end = 0
        if self._buffer.numel() < size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old buffer before the new one is allocated
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return {name: chunks.copied(self._copy) for name, chunks in tensors.items()}

    def synchronize_staging(self) -> None:
        """Does nothing: :meth:`stage` has made the copies."""

    def close(self) -> None:
        """Does nothing: the buffer is freed with the stager."""

    def _copy(self, tensor: Tensor) -> Tensor:
        begin = self._end
        self._end += _room(tensor)
        elements = self._buffer[begin : begin + tensor.numel() * tensor.itemsize]
        return elements.view(tensor.dtype).view(tensor.shape).copy_(tensor)


class Staged(AsyncStager):
    """Hands a :class:`Stager`'s copies to ``dcp.async_save`` unchanged.

    Copying before that call lets the ranks agree on success. DCP's own call of a stager may fail on one rank while the
    others begin to save and wait for that rank.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the state dict, whose tensors are copies, unchanged."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Does nothing: the copies exist already."""

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


def _chunks(name: str, value: Any) -> Chunks:
    if isinstance(value, Chunks):
        return value
    if type(value) in (Tensor, torch.nn.Parameter):
        return Chunks.whole(value)
    raise TypeError(f"got {type(value).__name__} for {name}, expected Chunks or a plain tensor")


def _room(tensor: Tensor) -> int:
    """Bytes that a copy takes up, with what keeps the next one aligned."""
    return math.ceil(tensor.numel() * tensor.itemsize / _ALIGNMENT) * _ALIGNMENT
