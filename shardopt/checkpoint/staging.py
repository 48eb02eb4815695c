"""Copies tensors to host memory or a local disk, from which an asynchronous save writes while training goes on."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.items import Chunks
from shardopt.kernels.memory import copy_to_host

_ALIGNMENT = 64  # bytes


class Stager:
    """Copies tensors to host memory, or to a file that is mapped into memory.

    All copies lie in one staging buffer, which the next :meth:`stage` uses again: the system clears each page of new
    memory on first touch, which takes several times as long as copying. The buffer grows when more memory is needed.

    Args:
        folder: a folder on a local disk for the buffer; None for host memory. The file has no name, so that nothing is
            left of it when the process ends.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def stage(self, tensors: Mapping[str, Chunks]) -> dict[str, Chunks]:
        """Copies this rank's rectangles into the staging buffer, over earlier copies, and returns chunks of the copies.

        Raises:
            RuntimeError: there is not enough memory.
            CheckpointError: there is not enough room in the folder, or no file can be made there.
        """
        rectangles = [tensor for chunks in tensors.values() for tensor in chunks.parts.values()]
        sizes = [math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT for tensor in rectangles]
        total = sum(sizes)
        if self._buffer.numel() < total:
            self._buffer = self._buffer.new_empty(0)  # frees the old buffer before the new one is allocated
            self._buffer = self._buffer.new_empty(total) if self.folder is None else _mapped(self.folder, total)
        pieces = torch.split(self._buffer[:total], sizes)
        copies = [
            piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for piece, tensor in zip(pieces, rectangles, strict=True)
        ]
        copy_to_host(copies, rectangles)
        in_order = iter(copies)
        return {
            name: replace(chunks, parts={offsets: next(in_order) for offsets in chunks.parts})
            for name, chunks in tensors.items()
        }


def _mapped(folder: Path, size: int) -> Tensor:
    """A tensor of bytes that is mapped to an unnamed file in a folder; the file exists as long as the tensor."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a write to a mapped page without room would kill the process
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot stage {size} bytes: {error.strerror or error}; make room or choose another staging_dir"
        ) from error
