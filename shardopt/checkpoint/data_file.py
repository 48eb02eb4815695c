"""The data files of a checkpoint: the bytes of chunks, each verified by its checksum before any other use.

Threads write and read chunks in pieces of a few MiB, a few pieces ahead of the caller, so that checksums, disk and
copies to or from a GPU overlap without a large buffer.
"""

from __future__ import annotations

import itertools
import math
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeAlias, TypeVar, cast

from torch import Tensor

from shardopt.checkpoint import table
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.index import Index, StoredFile, unknown_content
from shardopt.checkpoint.storage import Folder
from shardopt.checkpoint.table import StoredChunk
from shardopt.kernels.memory import memoryview_of

T = TypeVar("T")

#: A value that a job returned, or an error that it raised.
_Result: TypeAlias = "tuple[T | None, BaseException | None]"

_MAX_BYTES = table.MAX_BYTES  # of a piece; each piece is stored as a chunk of its own
_ALIGNMENT = 64  # bytes
_THREADS = 2
#: Most jobs under way, from a job's start until the caller has used the result.
_AHEAD = _THREADS + 1


def write_data_file(folder: Folder, name: str, parts: Iterable[tuple[int, Sequence[int], Tensor]]) -> StoredFile:
    """Writes a new data file with its table, and removes the file if that fails.

    Args:
        folder: the checkpoint's folder.
        name: the file's name.
        parts: rectangles of tensors, on any device: the tensor's number in the order of names, offsets, and data. The
            caller's thread iterates over them, a few pieces ahead.

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
                chunk = StoredChunk(inside, extents, 0, _aligned(end), math.prod(extents) * data.itemsize, crc32=0)
                end = chunk.position + chunk.bytes
                numbers.append(number)
                yield partial(_with_checksum, chunk, memoryview_of(data[rectangle(corner, extents)]))

    with folder.writing(name) as write:
        # One thread writes: several would wait for each other at the file.
        with computed_ahead(jobs()) as checked:
            for chunk, data in checked:
                write(data, chunk.position)
                stored.append(chunk)
        of_chunks = table.encoded(numbers, stored)
        begin = _aligned(stored[-1].position + stored[-1].bytes) if stored else 0
        write(memoryview(of_chunks), begin)
    return StoredFile(begin, len(of_chunks), zlib.crc32(of_chunks))


def require_little_endian() -> None:
    """Raises on a machine of another byte order than that of checkpoints.

    Raises:
        CheckpointError: the machine is big-endian.
    """
    if sys.byteorder != "little":
        raise CheckpointError(
            "got a big-endian machine, expected a little-endian one, whose byte order checkpoints have"
        )


def check_lengths(folder: Folder, index: Index, numbers: Iterable[int]) -> None:
    """Checks that data files exist and have their full lengths.

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


def rectangle(offsets: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """The index of a rectangle in a tensor."""
    return tuple(slice(offset, offset + extent) for offset, extent in zip(offsets, shape, strict=True))


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and shapes of a chunk's pieces of at most ``_MAX_BYTES``.

    Each piece is a range of one dimension, at a single index of every dimension before and in full in every dimension
    behind, so that the piece's elements are contiguous in the chunk.
    """
    if not shape:
        yield (), ()
    if 0 in shape or not shape:
        return
    dim = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) * itemsize <= _MAX_BYTES)
    behind = shape[dim + 1 :]
    most = _MAX_BYTES // (math.prod(behind) * itemsize)
    for before in itertools.product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], most):
            yield (*before, start, *([0] * len(behind))), (*([1] * dim), min(most, shape[dim] - start), *behind)


def _with_checksum(chunk: StoredChunk, data: memoryview) -> tuple[StoredChunk, memoryview]:
    return chunk._replace(crc32=zlib.crc32(data)), data


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


@contextmanager
def computed_ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[Iterator[T]]:
    """The jobs' results in order, computed by threads a few jobs ahead of the caller.

    Iterates over ``jobs`` in the caller's thread. The threads end with the context, also after an error.
    """
    # Not a ThreadPoolExecutor: an asynchronous save could not use it while the interpreter exits, and Ctrl-C in one of
    # its locks would leave the threads waiting. A SimpleQueue is of C, which signals do not interrupt half-way.
    todo: SimpleQueue[tuple[SimpleQueue[_Result[T]], Callable[[], T]] | None] = SimpleQueue()
    threads = [Thread(target=_work, args=(todo,), daemon=True, name="shardopt chunks") for _ in range(_THREADS)]

    def results() -> Iterator[T]:
        pending: deque[SimpleQueue[_Result[T]]] = deque()
        for job in jobs:
            pending.append(SimpleQueue())
            todo.put((pending[-1], job))
            if len(pending) == _AHEAD:
                yield _value(pending.popleft().get())
        while pending:
            yield _value(pending.popleft().get())

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


def _work(todo: SimpleQueue[tuple[SimpleQueue[_Result[T]], Callable[[], T]] | None]) -> None:
    while (task := todo.get()) is not None:
        result, job = task
        try:
            result.put((job(), None))
        except BaseException as error:
            result.put((None, error))


def _value(result: _Result[T]) -> T:
    value, error = result
    if error is not None:
        raise error
    return cast(T, value)
