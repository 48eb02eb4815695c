"""The file ``.metadata`` of torch.distributed.checkpoint, and the tensors of its data files: read without trust.

Both are pickles. Only the classes named here are found in them; anything else is an error before it is called.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata

from shardopt.checkpoint.convert.torch_archive import STORAGES
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.wording import named

_LAYOUTS = {"torch.strided": torch.strided}


def _enum_member(kind: Any, name: Any) -> Any:
    """In place of ``getattr``, by which Python 3.11.0 to 3.11.3 pickle members of an Enum."""
    if kind is not _ALLOWED["torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"]:
        raise pickle.UnpicklingError(f"getattr of {type(kind).__name__}")
    return kind[name]


_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PurePosixPath,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "getattr"): _enum_member,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _ALLOWED[module, name]


def metadata_in(path: str, data: bytes) -> metadata.Metadata:
    """The content of ``.metadata``.

    Raises:
        CheckpointError: it is damaged, or has anything else than DCP writes.
    """
    found = unpickled(_Unpickler(io.BytesIO(data)).load, path)
    if type(found) is not metadata.Metadata or not all(
        isinstance(getattr(found, key, None), dict) for key in ("state_dict_metadata", "planner_data", "storage_data")
    ):
        raise CheckpointError(f"{path}: got metadata of another kind, expected those of DCP's default planner")
    return found


class StoredInZip(NamedTuple):
    """A tensor in a record of a zip archive.

    Attributes:
        dtype: the dtype.
        shape: the shape.
        position: of the first element in the file, bytes; None where elements are not in row-major order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    position: int | None


class _Rebuilt(NamedTuple):
    storage: tuple[Any, ...]
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuilt(storage: Any, offset: Any, shape: Any, stride: Any, *others: Any) -> _Rebuilt:
    return _Rebuilt(storage, offset, tuple(shape), tuple(stride))


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        for dtype, storage in STORAGES.items():
            if (module, name) == ("torch", storage.__name__):
                return dtype
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, saved: Any) -> Any:
        return saved


def tensor_in_zip(file: BinaryIO, begin: int, length: int, path: str) -> StoredInZip:
    """Where the elements are of a tensor that torch.save wrote into a range of a file.

    Args:
        file: the file.
        begin: where the range begins, bytes.
        length: the range's, bytes.
        path: the file's, for errors.

    Raises:
        CheckpointError: the range has something else, or is damaged.
    """

    def work() -> StoredInZip:
        with zipfile.ZipFile(_Range(file, begin, length)) as archive:  # type: ignore[arg-type]
            (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            found = _TensorUnpickler(io.BytesIO(archive.read(pickled))).load()
            if not isinstance(found, _Rebuilt):
                raise pickle.UnpicklingError(type(found).__name__)
            kind, dtype, key, _, numel = found.storage
            info = archive.getinfo(pickled.replace("data.pkl", f"data/{key}"))
            if kind != "storage" or info.compress_type or info.file_size < numel * dtype.itemsize:
                raise pickle.UnpicklingError("a storage of another length")
            is_dense = found.stride == torch.empty(found.shape, device="meta").stride()
            if is_dense and not 0 <= found.offset <= numel - math.prod(found.shape):
                raise pickle.UnpicklingError("a tensor beyond its storage")
            file.seek(begin + info.header_offset + 26)
            name_length, extra_length = (int.from_bytes(file.read(2), "little") for _ in range(2))
            data = begin + info.header_offset + 30 + name_length + extra_length
            return StoredInZip(dtype, found.shape, data + found.offset * dtype.itemsize if is_dense else None)

    found: StoredInZip = unpickled(work, path)
    return found


def unpickled(work: Callable[[], Any], path: str) -> Any:
    """The result of a function that unpickles.

    Raises:
        CheckpointError: it raised what damaged or hostile data lead to.
    """
    try:
        return work()
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:  # pickles of other types fail in many ways
        raise CheckpointError(
            f"{path}: got {type(error).__name__}: {named(str(error))}, expected what DCP writes: tensors and plain "
            "values of the classes that it needs; save it again with torch.distributed.checkpoint"
        ) from None


class _Range(io.RawIOBase):
    """A range of bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length = file, begin, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence], 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._begin + self._at)
        found = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(found)
        return found
