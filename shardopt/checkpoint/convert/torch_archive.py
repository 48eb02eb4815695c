"""Writes a file as torch.save does, one tensor after another and each in parts.

The format is a zip archive without compression: ``data.pkl`` has the objects, in which a tensor refers to the record
``data/<number>`` with its elements; ``torch/csrc/jit/serialization`` and ``torch/serialization.py`` read it.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from shardopt.checkpoint.errors import CheckpointError

_ALIGNMENT = 64  # bytes
_LOCAL_HEADER = 30  # bytes, without the name and what follows it
_ZIP64_FIELD = 20  # bytes
_LARGE = 1 << 31  # bytes: such records need the fields of zip64

#: The classes that files of torch.save name for dtypes.
STORAGES: dict[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


class _Storage(NamedTuple):
    number: int
    dtype: torch.dtype
    numel: int


class ArchivedTensor:
    """A tensor in the archive, which the objects refer to.

    Args:
        number: of the record with the elements.
        dtype: the dtype.
        shape: the shape.
    """

    def __init__(self, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.storage = _Storage(number, dtype, torch.Size(shape).numel())
        self.shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides = torch.empty(self.shape, device="meta").stride()
        return _rebuild_tensor_v2, (self.storage, 0, self.shape, strides, False, OrderedDict())


class TorchArchive:
    """Writes a new file; a context manager.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count = 0

    def __enter__(self) -> TorchArchive:
        self._file = open(self.path, "xb")
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED, allowZip64=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(Exception):  # an archive that is not complete, or a full disk
            self._zip.close()
        with suppress(OSError):
            self._file.close()

    def add(self, dtype: torch.dtype, shape: tuple[int, ...], parts: Iterable[bytes | memoryview]) -> ArchivedTensor:
        """Writes a tensor.

        Args:
            dtype: the dtype.
            shape: the shape.
            parts: its elements' bytes, in order.

        Raises:
            CheckpointError: the format has no such dtype.
        """
        if dtype not in STORAGES:
            raise CheckpointError(
                f"{self.path}: got a tensor of {dtype}, expected one of {', '.join(map(str, STORAGES))}; choose "
                "another format"
            )
        stored = ArchivedTensor(self._count, dtype, shape)
        self._count += 1
        self._record(f"data/{stored.storage.number}", parts, stored.storage.numel * dtype.itemsize)
        return stored

    def commit(self, content: Any) -> None:
        """Writes the objects, with :class:`ArchivedTensor` for tensors, and completes the file."""
        pickled = io.BytesIO()
        _Pickler(pickled, protocol=2).dump(content)
        self._record("data.pkl", [pickled.getvalue()], pickled.tell())
        self._record("byteorder", [b"little"], 6)
        self._record("version", [b"3\n"], 2)
        self._zip.close()
        self._file.flush()
        os.fsync(self._file.fileno())

    def _record(self, name: str, parts: Iterable[bytes | memoryview], size: int) -> None:
        info = zipfile.ZipInfo(f"archive/{name}")
        is_large = size >= _LARGE
        begin = self._file.tell() + _LOCAL_HEADER + len(info.filename) + is_large * _ZIP64_FIELD + 4
        padding = -begin % _ALIGNMENT
        info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding  # torch's own, so that tensors are aligned
        with self._zip.open(info, "w", force_zip64=is_large) as record:
            for part in parts:
                record.write(part)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if not isinstance(obj, _Storage):
            return None
        return "storage", STORAGES[obj.dtype], str(obj.number), "cpu", obj.numel


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
