"""Copies on the CPU of what is to be saved, so that training can go on while they are written."""

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

    All copies lie in one buffer, which the next :meth:`stage` uses again: the system clears each page of new memory
    when it is first touched, which takes several times as long as the copying. The buffer grows when it must.

    Attributes:
        in_use: whether a save reads the copies; set and cleared by who owns the stager.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._end = 0
        self.in_use = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies tensors. Earlier copies are lost.

        Raises:
            TypeError: something is no tensor.
        """
        tensors = {name: _chunks(name, value) for name, value in state_dict.items()}
        size = sum(_room(tensor) for chunks in tensors.values() for tensor in chunks.written.values())
        self._end = 0
        if self._buffer.numel() < size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return {name: chunks.copied(self._copy) for name, chunks in tensors.items()}

    def synchronize_staging(self) -> None:
        """Does nothing: the copies are made at once."""

    def close(self) -> None:
        """Does nothing: the buffer goes with the stager."""

    def _copy(self, tensor: Tensor) -> Tensor:
        begin = self._end
        self._end += _room(tensor)
        elements = self._buffer[begin : begin + tensor.numel() * tensor.itemsize]
        return elements.view(tensor.dtype).view(tensor.shape).copy_(tensor)


class Staged(AsyncStager):
    """Takes what a :class:`Stager` has copied already as it is, for ``dcp.async_save``.

    Copying before that lets ranks agree on whether it went well; DCP's own call of a stager may fail on one rank while
    the others begin to save and wait for it.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the state dict as it is: its tensors are copies."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Does nothing: the copies are made."""

    def close(self) -> None:
        """Does nothing: it has nothing."""


def _chunks(name: str, value: Any) -> Chunks:
    if isinstance(value, Chunks):
        return value
    if type(value) in (Tensor, torch.nn.Parameter):
        return Chunks.whole(value)
    raise TypeError(f"got {type(value).__name__} for {name}, expected Chunks or a plain tensor")


def _room(tensor: Tensor) -> int:
    """Bytes that a copy takes up, with what keeps the next one aligned."""
    return math.ceil(tensor.numel() * tensor.itemsize / _ALIGNMENT) * _ALIGNMENT
