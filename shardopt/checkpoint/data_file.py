"""The data files of a checkpoint: the bytes of chunks, each verified by its checksum before any other use.

Threads write and read chunks in pieces of a few MiB, a few pieces ahead of the caller, so that checksums, disk and
copies to or from a GPU overlap without a large buffer.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.index import StoredChunk
from shardopt.checkpoint.interrupts import interruption_point
from shardopt.checkpoint.own_files import open_own, own_size
from shardopt.checkpoint.pipeline import computed_ahead

_MAX_BYTES = 1 << 23  # of a piece; each piece is stored as a chunk of its own
_ALIGNMENT = 64  # bytes
_MOST_OPEN = 256  # files

_Piece = tuple[Callable[[], Tensor], tuple[slice, ...], StoredChunk]


class DataFileWriter:
    """A new data file.

    Args:
        path: the file, which must not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0
        self._pieces: list[_Piece] = []

    def add(self, data: Callable[[], Tensor], offsets: Sequence[int], shape: Sequence[int], itemsize: int) -> slice:
        """Adds a chunk.

        Args:
            data: returns the chunk, on any device; called when the chunk is about to be written.
            offsets: the chunk's offsets in its global tensor.
            shape: the chunk's shape.
            itemsize: bytes of an element.

        Returns:
            The indices of the chunk's pieces in the result of :meth:`write`.
        """
        first = len(self._pieces)
        for corner, extents in _pieces(tuple(shape), itemsize):
            position = -(-self._end // _ALIGNMENT) * _ALIGNMENT
            size = math.prod(extents) * itemsize
            self._end = position + size
            inside = tuple(a + b for a, b in zip(offsets, corner, strict=True))
            stored = StoredChunk(inside, extents, self._path.name, position, size, crc32=0)
            self._pieces.append((data, rectangle(corner, extents), stored))
        return slice(first, len(self._pieces))

    def write(self) -> list[StoredChunk]:
        """Writes all chunks to the disk. Removes the file if that fails.

        Raises:
            CheckpointError: the file exists already, or the system cannot write it.
        """
        with removed_on_failure(self._path, self._end), self._path.open("xb", buffering=0) as file:
            # One thread writes: several would wait for each other at the file.
            with computed_ahead(self._jobs()) as checked:
                stored = [_write_chunk(file.fileno(), chunk, data) for chunk, data in checked]
            os.fsync(file.fileno())
            sync_folder(self._path.parent)
        return stored

    def _jobs(self) -> Iterator[Callable[[], tuple[StoredChunk, memoryview]]]:
        for data, part, chunk in self._pieces:
            interruption_point()
            yield partial(_with_checksum, chunk, _bytes_of(data()[part]))


class OpenFile(NamedTuple):
    """A data file that is open for reading."""

    path: Path
    descriptor: int


@contextmanager
def opened(paths: Sequence[Path]) -> Iterator[Iterator[OpenFile]]:
    """Data files, open for reading, in order.

    Opens the first 256 files at once, so that their bytes stay readable if another save removes the files, and opens
    the others one by one.

    Raises:
        CheckpointError: a file cannot be opened.
    """
    descriptors: dict[Path, int] = {}

    def in_turn() -> Iterator[OpenFile]:
        for path in paths:
            if path not in descriptors:
                descriptors[path] = _open(path)
            yield OpenFile(path, descriptors[path])
            os.close(descriptors.pop(path))

    try:
        for path in paths[:_MOST_OPEN]:
            descriptors[path] = _open(path)
        yield in_turn()
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


@contextmanager
def read_chunks(file: OpenFile, chunks: Iterable[StoredChunk]) -> Iterator[Iterator[tuple[StoredChunk, Tensor]]]:
    """Chunks of a data file with their bytes (uint8), verified, in the order of the file.

    The bytes of a chunk are valid until the next chunk is requested.

    Raises:
        CheckpointError: the file cannot be read, or the checksum of a chunk is not that of the saved bytes.
    """
    in_order = sorted(chunks, key=lambda chunk: chunk.position)
    longest = max((chunk.bytes for chunk in in_order), default=0)
    free: list[Tensor] = []

    def jobs() -> Iterator[Callable[[], Tensor]]:
        for chunk in in_order:
            interruption_point()
            buffer = free.pop() if free else torch.empty(longest, dtype=torch.uint8)
            yield partial(_read_chunk, file, chunk, buffer)

    def verified(buffers: Iterator[Tensor]) -> Iterator[tuple[StoredChunk, Tensor]]:
        for chunk, buffer in zip(in_order, buffers, strict=True):
            yield chunk, buffer[: chunk.bytes]
            free.append(buffer)

    with computed_ahead(jobs()) as buffers:
        yield verified(buffers)


def check_lengths(folder: Path, files: Mapping[str, int]) -> None:
    """Checks that data files exist and have their full lengths.

    Args:
        folder: the folder of the files.
        files: the lengths of the files in bytes, by name.

    Raises:
        CheckpointError: a file does not exist or has another length.
    """
    for name, length in files.items():
        path = folder / name
        try:
            found = own_size(path)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be found ({error.strerror}), expected {length} bytes of data; is this a folder that "
                "all ranks see, and was it left alone by other saves?"
            ) from error
        if found != length:
            raise CheckpointError(
                f"{path}: got {found} bytes, expected {length}: the file was changed after the save; load another "
                "checkpoint"
            )


def rectangle(offsets: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """The index of a rectangle in a tensor."""
    return tuple(slice(offset, offset + extent) for offset, extent in zip(offsets, shape, strict=True))


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents, durably: a crash does not undo that.

    Raises:
        CheckpointError: the system cannot make the folder.
    """
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot make this folder: {error}; choose another path") from error
    for path in missing:
        sync_folder(path.parent)


@contextmanager
def removed_on_failure(path: Path, size: int) -> Iterator[None]:
    """Removes a new file if writing it fails.

    Args:
        path: the file. A file that existed before stays.
        size: bytes to be written, for the error.

    Raises:
        CheckpointError: the system cannot write the file.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, FileExistsError):
            with suppress(OSError):
                path.unlink()
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{path}: cannot write {size} bytes: {error.strerror or error}; make room or choose another path. The "
                "previous checkpoint in this folder, if there was one, is as it was"
            ) from error
        raise


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, on file systems that support that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _with_checksum(chunk: StoredChunk, data: memoryview) -> tuple[StoredChunk, memoryview]:
    return chunk._replace(crc32=zlib.crc32(data)), data


def _write_chunk(file: int, chunk: StoredChunk, data: memoryview) -> StoredChunk:
    position = chunk.position
    while len(data):
        written = os.pwrite(file, data, position)
        data, position = data[written:], position + written
    return chunk


def _open(path: Path) -> int:
    try:
        return open_own(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error}; load another checkpoint") from error


def _read_chunk(file: OpenFile, chunk: StoredChunk, buffer: Tensor) -> Tensor:
    """Reads a chunk into the buffer and verifies it."""
    path = file.path
    data = buffer.numpy().data[: chunk.bytes]
    filled = 0
    while filled < chunk.bytes:
        try:
            count = os.preadv(file.descriptor, [data[filled:]], chunk.position + filled)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}; load another checkpoint") from error
        if count == 0:
            raise CheckpointError(f"{path}: ended while it was read; was another checkpoint saved there meanwhile?")
        filled += count
    found = zlib.crc32(data)
    if found != chunk.crc32:
        raise CheckpointError(
            f"{path}: got checksum {found:08x} of the {chunk.bytes} bytes at {chunk.position}, expected "
            f"{chunk.crc32:08x}: the bytes were damaged after the save; load another checkpoint"
        )
    return buffer
