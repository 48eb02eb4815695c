"""Writes a data file of a checkpoint, and reads its table of chunks. Each chunk of a tensor has a CRC-32.

Worker threads run a few chunks ahead of the caller: checksums overlap with the caller's writes and its copies from a
GPU. Chunks are small, so that the buffers in flight are small.

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
from shardopt.checkpoint.index import MAX_DIMS, Index, StoredFile, StoredTensor, data_file_name, unknown_content
from shardopt.checkpoint.rectangles import slices
from shardopt.checkpoint.storage import Folder
from shardopt.checkpoint.wording import named
from shardopt.kernels.memory import memoryview_of

T = TypeVar("T")

#: A queue that gets a job's result, or the error that the job raised.
_Outcome = SimpleQueue[tuple[Any, BaseException | None]]

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
    nbytes: int
    crc32: int


def write_data_file(folder: Folder, name: str, parts: Iterable[tuple[int, Sequence[int], Tensor]]) -> StoredFile:
    """Writes a new data file with its table, and removes the file if that fails with an OSError.

    ``parts`` has for each rectangle the tensor's position among the sorted names, the rectangle's offsets in the
    tensor, and its elements, on any device; iterated over in the caller's thread, a few chunks ahead of the writing.
    """
    numbers: list[int] = []
    stored: list[StoredChunk] = []

    def jobs() -> Iterator[Callable[[], tuple[StoredChunk, memoryview]]]:
        end = 0
        for number, offsets, data in parts:
            for corner, extents in _pieces(tuple(data.shape), data.itemsize):
                in_tensor = tuple(a + b for a, b in zip(offsets, corner, strict=True))
                chunk = StoredChunk(in_tensor, extents, _aligned(end), math.prod(extents) * data.itemsize, crc32=0)
                end = chunk.position + chunk.nbytes
                numbers.append(number)
                yield partial(_with_checksum, chunk, memoryview_of(data[slices(corner, extents)]))

    with folder.writing(name) as write:
        # One thread writes: several would wait for each other at the file.
        with computed_ahead(jobs()) as checked:
            for chunk, data in checked:
                write(data, chunk.position)
                stored.append(chunk)
        table = table_of(numbers, stored)
        table_position = _aligned(stored[-1].position + stored[-1].nbytes) if stored else 0
        write(memoryview(table), table_position)
    return StoredFile(table_position, len(table), zlib.crc32(table))


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

    ``tensors`` are all tensors of the checkpoint, sorted by name; the table follows ``length`` bytes of chunks. Raises
    InvalidError if a chunk is empty or too large, not within its tensor or the file, or shares bytes with another.
    """
    demand(len(data) >= _HEAD, "a table without a head")
    count, dims = (int(x) for x in np.frombuffer(data, dtype="<u8", count=2))
    expected_length = _HEAD + count * (_PER_CHUNK + 16 * dims)
    demand(dims <= MAX_DIMS and len(data) == expected_length, "a table of another length than it says")
    position = np.frombuffer(data, "<i8", count, _HEAD)
    number = np.frombuffer(data, "<u4", count, _HEAD + 8 * count)
    crc32 = np.frombuffer(data, "<u4", count, _HEAD + 12 * count)
    corners = np.frombuffer(data, "<i8", 2 * count * dims, _HEAD + 16 * count).reshape(count, 2, dims)
    offsets, extents = corners[:, 0], corners[:, 1]
    demand(not count or int(number.max()) < len(tensors), "a chunk of a tensor that is not in the index")
    names = list(tensors)
    present, row_of_chunk = np.unique(number, return_inverse=True)  # tensors with chunks: a row each in the next arrays
    shapes = np.ones((len(present), dims), dtype=np.int64)
    itemsizes = np.empty(len(present), dtype=np.int64)
    for row, name in enumerate(names[i] for i in present.tolist()):
        dtype, shape = tensors[name].dtype, tensors[name].shape
        demand(len(shape) <= dims, f"a chunk of too few dimensions of {named(name)}")
        shapes[row, : len(shape)], itemsizes[row] = shape, dtype.itemsize
    room = shapes[row_of_chunk] - offsets
    is_inside = (offsets >= 0) & (extents >= 1) & (room >= 0) & (extents <= room)
    demand(bool(is_inside.all()), "a chunk that is empty or beyond its tensor")
    nbytes = extents.prod(axis=1) * itemsizes[row_of_chunk]  # of a tensor within memory, so below 2**63
    demand(bool((nbytes <= MAX_BYTES).all()), f"a chunk of more than {MAX_BYTES} bytes")
    order = np.argsort(position, kind="stable")
    starts, sizes = position[order], nbytes[order]
    is_inside = (starts >= 0) & (sizes <= length) & (starts <= length - sizes)  # starts + sizes may be above 2**63
    demand(bool(is_inside.all()), "chunks beyond the end of the file")
    demand(bool((starts[:-1] + sizes[:-1] <= starts[1:]).all()), "chunks that overlap in the file")
    chunks: dict[str, list[StoredChunk]] = {names[i]: [] for i in present.tolist()}
    columns = [column.tolist() for column in (number, offsets, extents, position, nbytes, crc32)]
    for i, corner, shape, *location in zip(*columns, strict=True):
        dims = len(tensors[names[i]].shape)
        chunks[names[i]].append(StoredChunk(tuple(corner[:dims]), tuple(shape[:dims]), *location))
    return chunks


def check_lengths(folder: Folder, index: Index, numbers: Iterable[int]) -> None:
    """Raises CheckpointError unless the data files of these numbers exist and are as long as the index says."""
    for number in numbers:
        stored, name = index.files[number], data_file_name(index.token, number)
        path = folder.path_of(name)
        if stored is None:
            raise unknown_content(path, "a tensor in a file that is not listed")
        length = stored.data + stored.table
        try:
            size = folder.size(name)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be found ({error.strerror}), expected {length} bytes of data; is this a folder that "
                "all ranks see, and was it left alone by other saves?"
            ) from None
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
    most = MAX_BYTES // (math.prod(behind) * itemsize)  # indices of dimension ``dim`` in a chunk
    for before in itertools.product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], most):
            yield (*before, start, *([0] * len(behind))), (*([1] * dim), min(most, shape[dim] - start), *behind)


def _with_checksum(chunk: StoredChunk, data: memoryview) -> tuple[StoredChunk, memoryview]:
    """A chunk with the CRC-32 of its data, and the data; runs in a worker thread."""
    return chunk._replace(crc32=zlib.crc32(data)), data


def _aligned(position: int) -> int:
    """The next position in a file at which a chunk or the table may begin."""
    return -(-position // _ALIGNMENT) * _ALIGNMENT


@contextmanager
def computed_ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[Iterator[T]]:
    """Runs jobs in worker threads, up to ``AHEAD`` in flight; yields an iterator over their results, in order.

    Iterates over ``jobs`` in the caller's thread. Joins the threads at the end of the context, also after an error.
    """
    # Not a ThreadPoolExecutor: an asynchronous save could not use it while the interpreter exits, and Ctrl-C in one of
    # its locks would leave the threads waiting. SimpleQueue is C code, which no signal interrupts half-way.
    tasks: SimpleQueue[tuple[_Outcome, Callable[[], T]] | None] = SimpleQueue()
    threads = [Thread(target=_work, args=(tasks,), daemon=True, name="shardopt chunks") for _ in range(_THREADS)]
    in_flight: deque[_Outcome] = deque()

    def oldest_result() -> Any:
        value, error = in_flight.popleft().get()
        if error is not None:
            raise error
        return value

    def results() -> Iterator[T]:
        for job in jobs:
            in_flight.append(SimpleQueue())
            tasks.put((in_flight[-1], job))
            if len(in_flight) == AHEAD:
                yield oldest_result()
        while in_flight:
            yield oldest_result()

    try:
        for thread in threads:
            thread.start()
        yield results()
    finally:
        with suppress(Empty):  # after an error: drops jobs that no thread has begun
            while True:
                tasks.get_nowait()
        for _ in threads:
            tasks.put(None)
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join()


def _work(tasks: SimpleQueue[tuple[_Outcome, Callable[[], Any]] | None]) -> None:
    """Runs jobs until None comes, in a worker thread; puts what each returns or raises into its queue."""
    while (task := tasks.get()) is not None:
        outcome, job = task
        try:
            outcome.put((job(), None))
        except BaseException as error:
            outcome.put((None, error))
