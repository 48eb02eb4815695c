"""Writes a data file of a checkpoint, and reads its table of chunks. Each chunk of a tensor has a CRC-32.

Worker threads run a few chunks ahead of the caller, so that checksums, disk and copies to or from a GPU overlap. Chunks
are small, so that the buffers in flight are small.

The table behind the last chunk says where each chunk is, in binary columns. All numbers are little-endian. With ``n``
chunks of tensors of at most ``d`` dimensions::

    n, d        2 x uint64
    position    n x int64    of the chunk's first byte in the file
    tensor      n x uint32   position of the tensor's name among the sorted names (code points)
    crc32       n x uint32   CRC-32 of the chunk's bytes
    corners     n x 2 x d x int64   offsets and shape in the tensor; padded to d dimensions with 0 and 1

No chunk is empty, or larger than 8 MiB. The index has the table's length and CRC-32.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from shardopt.checkpoint.errors import CheckpointError, demand
from shardopt.checkpoint.index import MAX_DIMS, Index, StoredFile, StoredTensor, unknown_content
from shardopt.checkpoint.rectangles import slices
from shardopt.checkpoint.storage import Folder
from shardopt.checkpoint.wording import named
from shardopt.kernels.memory import memoryview_of

T = TypeVar("T")

#: The queue for a job's result (or the error that it raised), and the job.
_Task = tuple["SimpleQueue[tuple[Any, BaseException | None]]", Callable[[], Any]]

MAX_BYTES = 1 << 23  # of a chunk: a reader's buffers are this large, whatever a file says
_HEAD = 16  # bytes of a table before its columns
_PER_CHUNK = 16  # bytes of a table per chunk, without corners
_ALIGNMENT = 64  # bytes
_THREADS = 2
#: Most jobs in flight: queued, running, or done with a result that the caller still uses.
AHEAD = _THREADS + 1


class StoredChunk(NamedTuple):
    """A rectangle of a tensor, and where its bytes are in the data file, with their CRC-32."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    position: int  # offset of the first byte in the file
    bytes: int
    crc32: int


def write_data_file(folder: Folder, name: str, parts: Iterable[tuple[int, Sequence[int], Tensor]]) -> StoredFile:
    """Writes a new data file with its table, and removes the file if that fails.

    Args:
        folder: the checkpoint's folder.
        name: the file's name.
        parts: for each rectangle: the tensor's position among the sorted names, the rectangle's offsets in the tensor,
            and its elements, on any device. Iterated over in the caller's thread, a few chunks ahead of the writing.

    Raises:
        OSError: the file exists already, or the system cannot write it.
    """
    numbers: list[int] = []
    stored: list[StoredChunk] = []

    def jobs() -> Iterator[Callable[[], tuple[StoredChunk, memoryview]]]:
        end = 0
        for number, offsets, data in parts:
            for corner, extents in _pieces(tuple(data.shape), data.itemsize):
                inside = tuple(a + b for a, b in zip(offsets, corner, strict=True))
                chunk = StoredChunk(inside, extents, _aligned(end), math.prod(extents) * data.itemsize, crc32=0)
                end = chunk.position + chunk.bytes
                numbers.append(number)
                yield partial(_with_checksum, chunk, memoryview_of(data[slices(corner, extents)]))

    with folder.writing(name) as write:
        # One thread writes: several would wait for each other at the file.
        with computed_ahead(jobs()) as checked:
            for chunk, data in checked:
                write(data, chunk.position)
                stored.append(chunk)
        of_chunks = table_of(numbers, stored)
        begin = _aligned(stored[-1].position + stored[-1].bytes) if stored else 0
        write(memoryview(of_chunks), begin)
    return StoredFile(begin, len(of_chunks), zlib.crc32(of_chunks))


def table_of(tensors: Sequence[int], chunks: Sequence[StoredChunk]) -> bytes:
    """Encodes the table of a data file; ``tensors``: for each chunk, its tensor's position among the sorted names."""
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


def chunks_in(data: bytes, tensors: Mapping[str, StoredTensor], length: int) -> dict[str, list[StoredChunk]]:
    """Decodes and validates the table of a data file, after its checksum was verified: the chunks by tensor name.

    Args:
        data: the table.
        tensors: all tensors of the checkpoint, sorted by name.
        length: how many bytes of the data file are chunks; the table follows them.

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
    demand(not count or int(tensor.max()) < len(tensors), "a chunk of a tensor that is not in the index")
    names = list(tensors)
    used, rows = np.unique(tensor, return_inverse=True)
    limits = np.ones((len(used), dims), dtype=np.int64)
    sizes = np.empty(len(used), dtype=np.int64)
    for row, number in enumerate(used.tolist()):
        dtype, shape, *_ = tensors[names[number]]
        demand(len(shape) <= dims, f"a chunk of too few dimensions of {named(names[number])}")
        limits[row, : len(shape)], sizes[row] = shape, dtype.itemsize
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
    chunks: dict[str, list[StoredChunk]] = {names[number]: [] for number in used.tolist()}
    columns = (tensor, low, extents, position, nbytes, crc32)
    for number, offsets, shape, at, size, checksum in zip(*(column.tolist() for column in columns), strict=True):
        dims = len(tensors[names[number]].shape)
        chunks[names[number]].append(StoredChunk(tuple(offsets[:dims]), tuple(shape[:dims]), at, size, checksum))
    return chunks


def check_lengths(folder: Folder, index: Index, numbers: Iterable[int]) -> None:
    """Checks that the data files of these numbers exist and are as long as the index says.

    Raises:
        CheckpointError: a file does not exist or has another length.
    """
    for number in numbers:
        stored, name = index.files[number], index.file_name(number)
        path = folder.shown(name)
        if stored is None:
            raise unknown_content(path, "a tensor in a file that is not listed")
        length = stored.data + stored.table
        try:
            size = folder.size(name)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be found ({error.strerror}), expected {length} bytes of data; is this a folder that "
                "all ranks see, and was it left alone by other saves?"
            ) from error
        if size != length:
            raise CheckpointError(
                f"{path}: got {size} bytes, expected {length}: the file was changed after the save; load another "
                "checkpoint"
            )


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts a rectangle of this shape into contiguous chunks of at most ``MAX_BYTES``; yields their offsets and shapes.

    Each chunk is a range of indices of one dimension, a single index of every dimension before, and all of every
    dimension behind, so that its elements are contiguous in row-major order.
    """
    if not shape:
        yield (), ()
    if 0 in shape or not shape:
        return
    dim = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) * itemsize <= MAX_BYTES)
    behind = shape[dim + 1 :]
    most = MAX_BYTES // (math.prod(behind) * itemsize)
    for before in itertools.product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], most):
            yield (*before, start, *([0] * len(behind))), (*([1] * dim), min(most, shape[dim] - start), *behind)


def _with_checksum(chunk: StoredChunk, data: memoryview) -> tuple[StoredChunk, memoryview]:
    return chunk._replace(crc32=zlib.crc32(data)), data


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


@contextmanager
def computed_ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[Iterator[T]]:
    """Runs jobs in worker threads, up to ``AHEAD`` in flight; yields an iterator over their results, in order.

    Iterates over ``jobs`` in the caller's thread. Joins the threads at the end of the context, also after an error.
    """
    # Not a ThreadPoolExecutor: an asynchronous save could not use it while the interpreter exits, and Ctrl-C in one of
    # its locks would leave the threads waiting. SimpleQueue is C code, which no signal interrupts half-way.
    todo: SimpleQueue[_Task | None] = SimpleQueue()
    threads = [Thread(target=_work, args=(todo,), daemon=True, name="shardopt chunks") for _ in range(_THREADS)]
    pending: deque[SimpleQueue[tuple[Any, BaseException | None]]] = deque()

    def first() -> Any:
        value, error = pending.popleft().get()
        if error is not None:
            raise error
        return value

    def results() -> Iterator[T]:
        for job in jobs:
            pending.append(SimpleQueue())
            todo.put((pending[-1], job))
            if len(pending) == AHEAD:
                yield first()
        while pending:
            yield first()

    try:
        for thread in threads:
            thread.start()
        yield results()
    finally:
        with suppress(Empty):  # jobs that no thread has begun
            while True:
                todo.get_nowait()
        for _ in threads:
            todo.put(None)
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _work(todo: SimpleQueue[_Task | None]) -> None:
    while (task := todo.get()) is not None:
        result, job = task
        try:
            result.put((job(), None))
        except BaseException as error:
            result.put((None, error))
