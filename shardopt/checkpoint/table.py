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

from shardopt.checkpoint.wording import named

MAX_DIMS = 64  # of a torch.Tensor
MAX_BYTES = 1 << 23  # of a chunk, so that no file makes a reader allocate more
_HEAD = 16  # bytes
_PER_CHUNK = 16  # bytes, without corners


class StoredChunk(NamedTuple):
    """A rectangle of a tensor, and the location of its bytes."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: int  # number
    position: int  # offset of the first byte in the file
    bytes: int
    crc32: int


class InvalidError(Exception):
    """A file has content that no version of shardopt writes."""


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


def decoded(
    data: bytes, shapes: Sequence[tuple[int, ...]], itemsizes: Sequence[int], file: int, length: int
) -> dict[int, list[StoredChunk]]:
    """The chunks of each tensor in a table whose checksum is right, by the tensor's number.

    Args:
        data: the table.
        shapes: of the checkpoint's tensors, in the order of their names.
        itemsizes: bytes per element of these tensors.
        file: the number of the data file.
        length: the bytes of the chunks in the data file.

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
    chunks: dict[int, list[StoredChunk]] = {number: [] for number in used.tolist()}
    columns = (tensor, low, extents, position, nbytes, crc32)
    for number, offsets, shape, at, size, checksum in zip(*(column.tolist() for column in columns), strict=True):
        dims = len(shapes[number])
        chunks[number].append(StoredChunk(tuple(offsets[:dims]), tuple(shape[:dims]), file, at, size, checksum))
    return chunks


def demand(holds: object, what: str) -> None:
    """Raises InvalidError, with the words, unless the condition holds."""
    if not holds:
        raise InvalidError(what)
