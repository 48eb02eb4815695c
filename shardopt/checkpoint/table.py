"""The table at the end of a data file: the chunks in the file, in binary columns.

All numbers are little-endian. With ``n`` chunks of tensors of at most ``d`` dimensions::

    n, d        2 x uint64
    position    n x int64    of the chunk's first byte in the file
    tensor      n x uint32   the tensor's number, the names of the index in order of code points
    crc32       n x uint32   of the chunk's bytes
    corners     n x 2 x d x int64   offsets and shape in the tensor; behind the tensor's dimensions, 0 and 1

No chunk is empty, or larger than 8 MiB. The index has the table's length and CRC-32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardopt.checkpoint.wording import named

MAX_DIMS = 64  # of a torch.Tensor
MAX_BYTES = 1 << 23  # of a chunk, so that no file makes a reader allocate more
_HEAD = 16  # bytes
_PER_CHUNK = 16  # bytes, without corners


class StoredChunk(NamedTuple):
    """A rectangle of a tensor, and the location of its bytes."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    position: int  # offset of the first byte in the file
    bytes: int
    crc32: int


class InvalidError(Exception):
    """A file has content that no version of shardopt writes."""


class Table(NamedTuple):
    """The chunks of a data file.

    Attributes:
        position: int64, (n,).
        tensor: uint32, (n,).
        crc32: uint32, (n,).
        corners: int64, (n, 2, d).
    """

    position: npt.NDArray[np.int64]
    tensor: npt.NDArray[np.uint32]
    crc32: npt.NDArray[np.uint32]
    corners: npt.NDArray[np.int64]

    def chunks(self, rows: npt.NDArray[np.intp], dims: int, itemsize: int, file: str) -> list[StoredChunk]:
        """The chunks in some rows, all of one tensor."""
        chunks = []
        corners = self.corners[rows].tolist()
        numel = self.corners[rows, 1].prod(axis=1).tolist()
        places = zip(self.position[rows].tolist(), numel, self.crc32[rows].tolist(), strict=True)
        for (offsets, shape), (position, count, crc32) in zip(corners, places, strict=True):
            part = tuple(offsets[:dims]), tuple(shape[:dims])
            chunks.append(StoredChunk(*part, file, position, count * itemsize, crc32))
        return chunks


def encoded(tensors: Sequence[int], chunks: Sequence[StoredChunk]) -> bytes:
    """The table of some chunks, given the number of each chunk's tensor."""
    dims = max((len(chunk.shape) for chunk in chunks), default=0)
    corners = np.zeros((len(chunks), 2, dims), dtype="<i8")
    corners[:, 1] = 1
    for row, chunk in zip(corners, chunks, strict=True):
        row[0, : len(chunk.shape)], row[1, : len(chunk.shape)] = chunk.offsets, chunk.shape
    columns = [
        np.array([len(chunks), dims], dtype="<u8"),
        np.array([chunk.position for chunk in chunks], dtype="<i8"),
        np.array(tensors, dtype="<u4"),
        np.array([chunk.crc32 for chunk in chunks], dtype="<u4"),
        corners,
    ]
    return b"".join(column.tobytes() for column in columns)


def decoded(data: bytes, shapes: Sequence[tuple[int, ...]], itemsizes: Sequence[int], length: int) -> Table:
    """The chunks of a table, whose checksum is right.

    Takes shapes and bytes per element of the checkpoint's tensors in the order of their names, and the bytes of the
    chunks in the data file.

    Raises:
        InvalidError: a chunk is empty or too large, or does not lie within its tensor or the file, or chunks share
            bytes.
    """
    demand(len(data) >= _HEAD, "a table without a head")
    count, dims = (int(x) for x in np.frombuffer(data, dtype="<u8", count=2))
    length_said = _HEAD + count * (_PER_CHUNK + 16 * dims)
    demand(dims <= MAX_DIMS and len(data) == length_said, "a table of another length than it says")
    at = _HEAD
    position = np.frombuffer(data, "<i8", count, at)
    tensor = np.frombuffer(data, "<u4", count, at + 8 * count)
    crc32 = np.frombuffer(data, "<u4", count, at + 12 * count)
    corners = np.frombuffer(data, "<i8", 2 * count * dims, at + 16 * count).reshape(count, 2, dims)
    demand(not count or int(tensor.max()) < len(shapes), "a chunk of a tensor that is not in the index")
    used, rows = np.unique(tensor, return_inverse=True)
    limits = np.ones((len(used), dims), dtype=np.int64)
    sizes = np.empty(len(used), dtype=np.int64)
    for row, number in enumerate(used.tolist()):
        shape = shapes[number]
        demand(len(shape) <= dims, f"a chunk of too few dimensions of tensor {named(str(number))}")
        limits[row, : len(shape)], sizes[row] = shape, itemsizes[number]
    low, extents = corners[:, 0], corners[:, 1]
    within = (low >= 0) & (extents >= 1) & (low <= limits[rows]) & (extents <= limits[rows] - low)
    demand(bool(within.all()), "a chunk that is empty or beyond its tensor")
    nbytes = extents.prod(axis=1) * sizes[rows]  # of a tensor within memory, so below 2**63
    demand(bool((nbytes <= MAX_BYTES).all()), f"a chunk of more than {MAX_BYTES} bytes")
    order = np.argsort(position, kind="stable")
    begin, most = position[order], nbytes[order]
    within = (begin >= 0) & (most <= length) & (begin <= length - most)  # begin + most may be above 2**63
    demand(bool(within.all()), "chunks beyond the end of the file")
    demand(bool((begin[:-1] + most[:-1] <= begin[1:]).all()), "chunks that overlap in the file")
    return Table(position, tensor, crc32, corners)


def demand(holds: object, what: str) -> None:
    """Raises InvalidError, with the words, unless the condition holds."""
    if not holds:
        raise InvalidError(what)
