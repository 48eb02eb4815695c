"""Writes a safetensors file one tensor after another; the library's own writer wants all of them in memory at once."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.checkpoint.folder import sync_folder
from shardopt.kernels.memory import memoryview_of

#: The format's names of the dtypes.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Description(NamedTuple):
    """A tensor's description in the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class SafetensorsWriter:
    """Writes under a temporary name, and renames the complete file; a context manager.

    Keeps an error instead of raising it, and writes no more after it, because a caller that gathers tensors from other
    ranks must go on gathering.

    Args:
        path: the file.
        tensors: the tensors in the order of writing, which must put tensors with larger elements first.
        metadata: strings for the header.

    Attributes:
        failure: the first error; None without any.
    """

    def __init__(
        self, path: str | os.PathLike[str], tensors: Sequence[Description], metadata: Mapping[str, str]
    ) -> None:
        self._path = Path(path)
        self._temporary = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}.tmp")
        self._left = list(reversed(tensors))
        self.failure: Exception | None = None
        with self._keeping_failure():
            header = header_of(tensors, metadata)
            self._file = open(self._temporary, "xb")  # noqa: SIM115  closed by __exit__
            self._file.write(len(header).to_bytes(8, "little") + header)

    def write(self, tensor: Tensor) -> None:
        """Appends the next tensor, on any device. Another dtype or shape than the description's is a failure."""
        with self._keeping_failure():
            name, dtype, shape = self._left.pop()
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                raise ValueError(f"{name}: got {tuple(tensor.shape)} of {tensor.dtype}, expected {shape} of {dtype}")
            if self.failure is None:
                self._file.write(memoryview_of(tensor))

    def commit(self) -> None:
        """Renames the complete file to its final name, unless there was a failure."""
        with self._keeping_failure():
            if self.failure is None:
                assert not self._left
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._temporary, self._path)
                sync_folder(self._path.parent)

    @contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, other ranks must not wait for this one
            self.failure = self.failure or error

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if hasattr(self, "_file"):
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):  # after commit there is none
                os.unlink(self._temporary)


def header_of(tensors: Sequence[Description], metadata: Mapping[str, str]) -> bytes:
    """The header of a file with these tensors in this order, without the length before it."""
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        described[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)  # the tensors begin aligned
