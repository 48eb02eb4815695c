"""Copies of tensors in host memory, which are written while training goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shardopt.checkpoint.chunks import Chunks

_ALIGNMENT = 64  # bytes


class Stager:
    """Copies tensors to host memory.

    All copies lie in one staging buffer, which the next :meth:`stage` uses again: the system clears each page of new
    memory on first touch, which takes several times as long as copying. The buffer grows when more memory is needed.

    Attributes:
        in_use: whether a save reads the copies; the owner of the stager sets and clears this flag.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._end = 0
        self.in_use = False

    def stage(self, tensors: Mapping[str, Chunks]) -> dict[str, Chunks]:
        """Copies what this rank can save of tensors over the earlier copies."""
        size = sum(_room(tensor) for chunks in tensors.values() for tensor in chunks.written.values())
        self._end = 0
        if self._buffer.numel() < size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old buffer before the new one is allocated
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return {name: chunks.copied(self._copy) for name, chunks in tensors.items()}

    def _copy(self, tensor: Tensor) -> Tensor:
        begin = self._end
        self._end += _room(tensor)
        elements = self._buffer[begin : begin + tensor.numel() * tensor.itemsize]
        return elements.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _room(tensor: Tensor) -> int:
    """Bytes that a copy takes up, with what keeps the next one aligned."""
    return math.ceil(tensor.numel() * tensor.itemsize / _ALIGNMENT) * _ALIGNMENT
