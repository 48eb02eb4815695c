"""Reads this rank's rectangles of a checkpoint's tensors, however the ranks that saved had sharded them."""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.checkpoint.data_file import AHEAD, MAX_BYTES, StoredChunk, check_lengths, chunks_in, computed_ahead
from shardopt.checkpoint.errors import CheckpointError, InvalidError, ReplacedError
from shardopt.checkpoint.index import INDEX_NAME, Index, data_file_name, load_index, unknown_content
from shardopt.checkpoint.items import Chunks
from shardopt.checkpoint.rectangles import common_part, fills, relative_to, slices
from shardopt.checkpoint.storage import Folder, Read
from shardopt.checkpoint.wording import named
from shardopt.layout.partition import Part


def read_tensors(folder: Folder, index: Index, tensors: Mapping[str, Chunks]) -> None:
    """Fills the rectangles in ``tensors``, which must have the saved dtypes and shapes, from the data files.

    Reads each stored chunk that overlaps once, in full, to verify its checksum. Fills no rectangle on the meta device.
    If the checkpoint is damaged (CheckpointError) or another save replaces it (ReplacedError), some may be filled.
    """
    targets = [
        _Target(name, (offsets, tuple(tensor.shape)), tensor, [])
        for name, chunks in tensors.items()
        for offsets, tensor in chunks.parts.items()
    ]
    targets_in: dict[int, list[_Target]] = defaultdict(list)  # by the numbers of the files to read
    for target in targets:
        for number in index.tensors[target.name].files_of(target.part):
            targets_in[number].append(target)
    try:
        for number in sorted(targets_in):
            _read_file(folder, index, number, targets_in[number])
        for target in targets:
            if not fills(target.part[1], target.filled):
                what = f"chunks that do not fill {named(target.name)} {target.part[1]} from {target.part[0]}"
                raise unknown_content(folder.path_of(INDEX_NAME), what)
    except CheckpointError:
        if _is_replaced(folder, index):
            raise ReplacedError(
                f"{folder}: another checkpoint was saved there while this one was loaded; load again"
            ) from None
        raise


def _is_replaced(folder: Folder, index: Index) -> bool:
    """Whether another save has replaced the checkpoint of ``index``: its checksum would differ."""
    try:
        return load_index(folder).crc32 != index.crc32
    except CheckpointError:
        return False


class _Target(NamedTuple):
    """A rectangle of a global tensor that is to be read.

    Attributes:
        name: the global tensor's name.
        part: the rectangle's offsets and shape in the global tensor.
        tensor: the tensor to fill, of the rectangle's shape.
        filled: the intersections with stored chunks so far, with offsets relative to the rectangle's.
    """

    name: str
    part: Part
    tensor: Tensor
    filled: list[Part]


def _read_file(folder: Folder, index: Index, number: int, targets: Sequence[_Target]) -> None:
    """Reads the chunks of one data file that overlap targets, into these targets."""
    name = data_file_name(index.token, number)
    path = folder.path_of(name)
    check_lengths(folder, index, [number])
    try:
        with folder.reading(name) as read:
            _read_chunks(_read_table(index, number, read, path), read, path, targets)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; load another checkpoint") from None


def _read_chunks(
    chunks: Mapping[str, Sequence[StoredChunk]], read: Read, path: str, targets: Sequence[_Target]
) -> None:
    """Reads each chunk that overlaps targets once, copies it to the targets, and notes what is ``filled`` in them.

    ``AHEAD`` reads are in flight. A buffer is used again after as many chunks, when its data have been copied.
    """
    #: For each chunk, the parts of targets to fill, and the indices of their elements in the chunk.
    copies: dict[StoredChunk, list[tuple[Tensor, tuple[slice, ...]]]] = defaultdict(list)
    for target in targets:
        for chunk in chunks.get(target.name, ()):
            common = common_part(target.part, (chunk.offsets, chunk.shape))
            if common is not None:
                in_target, in_chunk = relative_to(common, target.part[0]), relative_to(common, chunk.offsets)
                copies[chunk].append((target.tensor[slices(*in_target)], slices(*in_chunk)))
                target.filled.append(in_target)
    in_order = sorted(copies, key=lambda chunk: chunk.position)
    buffers = [torch.empty(MAX_BYTES, dtype=torch.uint8, device="cpu") for _ in range(AHEAD)]

    def jobs() -> Iterator[Callable[[], Tensor]]:
        for chunk, buffer in zip(in_order, itertools.cycle(buffers), strict=False):
            yield partial(_read_verified, buffer[: chunk.nbytes], read, path, chunk.position, chunk.crc32)

    with computed_ahead(jobs()) as results:
        for chunk, data in zip(in_order, results, strict=True):
            for tensor, in_chunk_indices in copies[chunk]:
                tensor.copy_(data.view(tensor.dtype).view(chunk.shape)[in_chunk_indices])


def _read_table(index: Index, number: int, read: Read, path: str) -> dict[str, list[StoredChunk]]:
    """Reads, verifies and decodes the table of an open data file: its chunks, by the names of their tensors."""
    stored = index.files[number]
    assert stored is not None  # checking its length would have raised
    try:
        table = torch.empty(stored.table, dtype=torch.uint8, device="cpu")
    except RuntimeError:
        raise CheckpointError(
            f"{path}: got a table of {stored.table} bytes, expected one that fits into memory; load another checkpoint"
        ) from None
    _read_verified(table, read, path, stored.data, stored.crc32)
    try:
        return chunks_in(table.numpy().tobytes(), index.tensors, stored.data)
    except InvalidError as error:
        raise unknown_content(path, str(error)) from None


def _read_verified(buffer: Tensor, read: Read, path: str, position: int, crc32: int) -> Tensor:
    """Fills a buffer with the bytes at a position of a file, checks their CRC-32, and returns the buffer."""
    data, filled = buffer.numpy().data, 0
    while filled < len(data):
        count = read(data[filled:], position + filled)
        if count == 0:
            raise CheckpointError(f"{path}: ended while it was read; was another checkpoint saved there meanwhile?")
        filled += count
    got = zlib.crc32(data)
    if got != crc32:
        raise CheckpointError(
            f"{path}: got checksum {got:08x} of the {len(data)} bytes at {position}, expected {crc32:08x}: the bytes "
            "were damaged after the save; load another checkpoint"
        )
    return buffer
