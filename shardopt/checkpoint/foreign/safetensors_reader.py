"""Reads a safetensors file. The header is checked against the format in full before any tensor is read.

A file is read, not mapped into memory, so that one that is cut off or fails meanwhile is an error and no signal.
"""

from __future__ import annotations

import math
import os
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.foreign.plain_json import is_count, parsed
from shardopt.checkpoint.foreign.safetensors_writer import DTYPES
from shardopt.checkpoint.wording import named, shown

#: Bytes before the header, which have its length; the header's first byte is ``{``.
HEADER_BEGIN = 8

#: The library's limit.
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 64
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class TensorSpan(NamedTuple):
    """A tensor in a file: bytes ``begin`` to ``end``, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsReader:
    """An open file; a context manager.

    Args:
        path: the file.

    Attributes:
        tensors: the tensors' descriptions by name.
        metadata: strings from the header.

    Raises:
        CheckpointError: the file cannot be opened, is no safetensors file, or is truncated.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        if not os.path.isfile(path):
            raise CheckpointError(f"{path}: got no such file, expected one that save_safetensors wrote; check the path")
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by __exit__
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}; check its permissions") from error
        try:
            self.tensors, self.metadata = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU.

        Raises:
            CheckpointError: the system cannot read the file.
        """
        stored = self.tensors[name]
        data = self._bytes(self._data_begin + stored.begin, stored.end - stored.begin)
        return data.view(stored.dtype).view(stored.shape)

    def read_range(self, name: str, first: int, end: int) -> Tensor:
        """The elements ``[first, end)`` of a flattened tensor: 1-D, on the CPU.

        Raises:
            CheckpointError: the system cannot read the file.
        """
        stored = self.tensors[name]
        size = stored.dtype.itemsize
        return self._bytes(self._data_begin + stored.begin + first * size, (end - first) * size).view(stored.dtype)

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def _read_header(self) -> tuple[dict[str, TensorSpan], dict[str, str]]:
        size = os.fstat(self._file.fileno()).st_size
        if size <= HEADER_BEGIN:
            self._refuse(f"{size} bytes")
        head = self._bytes(0, HEADER_BEGIN + 1).numpy().tobytes()
        if head[HEADER_BEGIN:] != b"{":
            raise CheckpointError(
                f"{self._path}: got a file that begins with {head!r}, expected one of safetensors; check the path"
            )
        length = int.from_bytes(head[:HEADER_BEGIN], "little")
        if length > min(size - HEADER_BEGIN, _MAX_HEADER_BYTES):
            self._refuse(f"a header of {length} bytes in a file of {size}")
        self._data_begin = HEADER_BEGIN + length
        try:
            header = parsed(self._bytes(HEADER_BEGIN, length).numpy().tobytes())
        except ValueError as error:
            self._refuse(f"a header with {error}")
        if not isinstance(header, dict):
            self._refuse("a header that is no object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            self._refuse("metadata that are no strings")
        tensors = {name: self._stored(name, described) for name, described in header.items()}
        end = 0
        for name, stored in sorted(tensors.items(), key=lambda item: item[1][2:]):
            if stored.begin != end:
                self._refuse(f"{named(name)} at byte {stored.begin} of the data, which the one before ends at {end}")
            end = stored.end
        if end != size - self._data_begin:
            self._refuse(f"{size - self._data_begin} bytes of data, of which the header describes {end}")
        return tensors, metadata

    def _stored(self, name: str, described: Any) -> TensorSpan:
        if not isinstance(described, dict) or described.keys() != {"dtype", "shape", "data_offsets"}:
            self._refuse(f"{named(name)} without dtype, shape and data_offsets, or with more")
        dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            self._refuse(f"{named(name)} of dtype {shown(dtype)}")
        for counts in (shape, offsets):
            if not isinstance(counts, list) or len(counts) > _MAX_DIMS or not all(map(is_count, counts)):
                self._refuse(f"{named(name)} with {shown(counts)} for its shape or data_offsets")
        stored = TensorSpan(_DTYPES[dtype], tuple(shape), *offsets) if len(offsets) == 2 else None
        if stored is None or stored.end - stored.begin != math.prod(shape) * stored.dtype.itemsize:
            self._refuse(f"{named(name)} of {dtype} and shape {shown(shape)} at {shown(offsets)}")
        return stored

    def _bytes(self, position: int, count: int) -> Tensor:
        buffer = torch.empty(count, dtype=torch.uint8, device="cpu")
        data = buffer.numpy().data
        filled = 0
        while filled < count:
            try:
                read = os.preadv(self._file.fileno(), [data[filled:]], position + filled)
            except OSError as error:
                raise CheckpointError(f"{self._path}: cannot be read: {error.strerror}; save it again") from error
            if read == 0:
                self._refuse(f"its end at byte {position + filled}, which came while it was read")
            filled += read
        return buffer

    def _refuse(self, got: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: got {got}, expected a whole safetensors file; save it again")
