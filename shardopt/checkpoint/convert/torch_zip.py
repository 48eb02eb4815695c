"""Reads a file of ``torch.save``, or a range of one: tensors, mapped into memory, and plain values.

``torch.load(weights_only=True, mmap=True)`` runs no foreign code either, but sets no limit to time and memory, and maps
no file that is larger than memory.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.convert.pickled import Dict, Unused, size, unpickled

_LOCAL_HEADER = 30  # bytes, without the name and what follows it
_MAX_DIMS = 64
_TENSOR = "torch.Tensor"  # in place of the class, which could be called
_OF_TENSORS = "torch._utils._rebuild_wrapper_subclass"  # likewise


def torch_objects(descriptor: int, begin: int, length: int, classes: Mapping[tuple[str, str], Any]) -> Any:
    """The objects that torch.save wrote. Nothing but tensors, plain values and the classes given is unpickled.

    Values that JSON has not, such as sets and bytes, become :class:`Unused`.

    Args:
        descriptor: of the file, which may be closed afterwards.
        begin: where the zip archive begins, bytes.
        length: the archive's, bytes.
        classes: what stands for further classes and functions, by module and name.

    Raises:
        Exception: of any kind, if the archive is damaged or hostile.
    """
    if begin + length > os.fstat(descriptor).st_size:
        raise EOFError(f"{length} bytes from {begin} on")
    before = begin % mmap.ALLOCATIONGRANULARITY
    archive = _Archive(mmap.mmap(descriptor, before + length, access=mmap.ACCESS_READ, offset=begin - before))
    if archive.has("byteorder") and archive.record("byteorder") != b"little":
        raise pickle.UnpicklingError("another byte order than little-endian")
    return unpickled(archive.record("data.pkl"), {**_CLASSES, **classes}, archive.storage)


def mapped_tensor(memory: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], position: int) -> Tensor:
    """A tensor whose elements are in a file that is mapped into memory, and whose storage has no others."""
    numel = math.prod(shape)
    if numel == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    with warnings.catch_warnings():  # of memory that must not be written to, as the mapping
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=position).view(shape)


class _Archive:
    """A zip archive without compression, whose records lie in a folder, at the end of a mapping."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        with zipfile.ZipFile(mapped) as archive:  # type: ignore[call-overload]  # looks at the end, and for the directory
            self._records = {info.filename: info for info in archive.infolist()}
        (pickled,) = (name for name in self._records if name.endswith("/data.pkl"))
        self._folder = pickled.removesuffix("data.pkl")

    def has(self, name: str) -> bool:
        """Whether there is such a record."""
        return self._folder + name in self._records

    def record(self, name: str) -> bytes:
        """The bytes of a small record."""
        begin, length = self._place(name)
        return self._mapped[begin : begin + length]

    def storage(self, saved: Any) -> Tensor:
        """The storage that a persistent id names: 1-D, mapped into memory."""
        kind, dtype, key, _, numel = saved
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str or type(numel) is not int:
            raise pickle.UnpicklingError("another persistent id than a storage's")
        begin, length = self._place(f"data/{key}")
        if not 0 <= numel * dtype.itemsize <= length:
            raise pickle.UnpicklingError("a storage of another length")
        return mapped_tensor(self._mapped, dtype, (numel,), begin)

    def _place(self, name: str) -> tuple[int, int]:
        """Where a record's bytes begin, and how many there are."""
        info = self._records[self._folder + name]
        at = info.header_offset
        lengths = self._mapped[at + _LOCAL_HEADER - 4 : at + _LOCAL_HEADER]
        begin = at + _LOCAL_HEADER + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        if info.compress_type != zipfile.ZIP_STORED or at < 0 or begin + info.file_size > len(self._mapped):
            raise pickle.UnpicklingError("a record that is compressed, or not in the file")
        return begin, info.file_size


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *others: Any) -> Tensor:
    """In place of ``_rebuild_tensor_v2``. PyTorch checks that the elements lie in the storage."""
    are_sizes = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) <= _MAX_DIMS
    if (
        not are_sizes
        or not all(type(value) is int for value in (offset, *shape, *stride))
        or math.prod(shape) >= 1 << 62
    ):
        raise pickle.UnpicklingError("a tensor of other sizes than whole numbers")
    if not isinstance(storage, Tensor) or any(others[2:]):
        raise pickle.UnpicklingError("a tensor without storage, or a negated or conjugated view")
    return storage.as_strided(shape, stride, offset)


def _tensor_of_dtype(storage: Any, offset: Any, shape: Any, stride: Any, *others: Any) -> Tensor:
    """In place of ``_rebuild_tensor_v3``."""
    return _tensor(storage.view(others[2]), offset, shape, stride, *others[:2], *others[3:])


def _parameter(data: Any, *others: Any) -> Any:
    """In place of what makes a Parameter of a tensor."""
    return data


def _of_type(rebuild: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """In place of ``_rebuild_from_type_v2``, which makes a tensor with attributes, or of a subclass made of others."""
    if rebuild is _OF_TENSORS and isinstance(kind, type) and isinstance(state, dict):
        return kind(state)  # of those given to torch_objects
    if kind is not _TENSOR or rebuild not in (_tensor, _tensor_of_dtype):
        raise pickle.UnpicklingError("a tensor of another type")
    return rebuild(*arguments)


#: The classes that files of torch.save name for dtypes.
_STORAGES: dict[torch.dtype, Any] = {
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

_CLASSES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): Dict,
    ("collections", "Counter"): Dict,
    ("torch", "Size"): size,
    ("torch", "Tensor"): _TENSOR,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_wrapper_subclass"): _OF_TENSORS,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", storage.__name__): dtype for dtype, storage in _STORAGES.items()},
    **dict.fromkeys([("builtins", name) for name in ("bytearray", "complex", "set")], Unused),
    ("_codecs", "encode"): Unused,
    ("torch", "device"): Unused,
}
