"""Reads tensors of a portable checkpoint into the parts that this rank holds."""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from shardopt.checkpoint.data_file import (
    AHEAD,
    StoredChunk,
    check_lengths,
    chunks_in,
    computed_ahead,
    require_little_endian,
)
from shardopt.checkpoint.errors import CheckpointError, InvalidError
from shardopt.checkpoint.index import INDEX_NAME, Index, noticing_replacement, unknown_content
from shardopt.checkpoint.items import Chunks
from shardopt.checkpoint.rectangles import common_part, fill, inside, slices
from shardopt.checkpoint.storage import Folder, Source
from shardopt.checkpoint.wording import named
from shardopt.layout.partition import Part

_MOST_OPEN = 256  # files

#: The chunks to read. For each, the tensors to fill from it, and the rectangle of the chunk for each.
_Reads = dict[StoredChunk, list[tuple[Tensor, tuple[slice, ...]]]]


def read_tensors(folder: Folder, index: Index, tensors: Mapping[str, Chunks]) -> None:
    """Reads tensors of a checkpoint into chunks of the saved dtypes and shapes. Each stored chunk is read once.

    The tensors may have changed in part if reading fails. Tensors on the meta device are read and verified only.

    Raises:
        CheckpointError: the checkpoint is damaged, or the machine is big-endian.
    """
    require_little_endian()
    with noticing_replacement(folder, index), _DataFiles(folder, index) as files:
        reads = _reads(files, index, tensors)
        in_order = sorted(reads, key=lambda chunk: (chunk.file, chunk.position))
        longest = max((chunk.bytes for chunk in in_order), default=0)
        buffers = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(min(AHEAD, len(in_order)))]

        def jobs() -> Iterator[Callable[[], Tensor]]:
            for chunk, buffer in zip(in_order, itertools.cycle(buffers), strict=False):
                place = files[chunk.file], files.path(chunk.file), chunk.position, chunk.crc32
                yield partial(_filled, buffer[: chunk.bytes], *place)

        with computed_ahead(jobs()) as filled:
            for chunk, data in zip(in_order, filled, strict=True):
                for tensor, within in reads[chunk]:
                    tensor.copy_(data.view(tensor.dtype).view(chunk.shape)[within])


class _DataFiles(ExitStack):
    """The data files of a checkpoint, opened when they are asked for, and closed at the end of the context.

    Keeps the last 256 files open, so that their bytes stay readable if another save removes the files.
    """

    def __init__(self, folder: Folder, index: Index) -> None:
        super().__init__()
        self.folder, self._index = folder, index
        self._open: dict[int, Source] = {}
        self._names = sorted(index.tensors)  # in the order of their numbers in the tables
        self._shapes = [index.tensors[name].shape for name in self._names]
        self._itemsizes = [index.tensors[name].dtype.itemsize for name in self._names]
        self.callback(lambda: [file.close() for file in self._open.values()])

    def path(self, number: int) -> str:
        """A file's path, for errors."""
        return self.folder.shown(self._index.file_name(number))

    def __getitem__(self, number: int) -> Source:
        """The file with a number, whose length is checked when it is opened.

        Raises:
            CheckpointError: the file cannot be opened, or has another length than the index says.
        """
        if number not in self._open:
            check_lengths(self.folder, self._index, [number])
            try:
                file = self.folder.open(self._index.file_name(number))
            except OSError as error:
                raise CheckpointError(
                    f"{self.path(number)}: cannot be opened: {error}; load another checkpoint"
                ) from error
            if len(self._open) == _MOST_OPEN:  # no thread reads the first of so many any more
                self._open.pop(next(iter(self._open))).close()
            self._open[number] = file
        return self._open[number]

    def chunks(self, number: int) -> dict[str, list[StoredChunk]]:
        """The chunks of a file by the names of their tensors.

        Raises:
            CheckpointError: the file cannot be read, or the table is damaged or does not fit into memory.
        """
        file = self[number]  # checks that the file is as long as the index says, before memory is taken for it
        stored, path = self._index.files[number], self.path(number)
        assert stored is not None  # opening it would have raised
        try:
            data = torch.empty(stored.table, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise CheckpointError(
                f"{path}: got a table of {stored.table} bytes, expected one that fits into memory; load another "
                "checkpoint"
            ) from error
        _filled(data, file, path, stored.data, stored.crc32)
        try:
            chunks = chunks_in(data.numpy().tobytes(), self._shapes, self._itemsizes, number, stored.data)
        except InvalidError as error:
            raise unknown_content(path, str(error)) from None
        return {self._names[tensor]: of_tensor for tensor, of_tensor in chunks.items()}


def _reads(files: _DataFiles, index: Index, tensors: Mapping[str, Chunks]) -> _Reads:
    """The chunks that tensors are to be read from. Opens the files that have any of them, and reads their tables."""
    targets = [(name, offsets, tensor) for name, of in tensors.items() for offsets, tensor in of.held.items()]
    targets_of: dict[int, list[int]] = defaultdict(list)  # numbers of targets by numbers of files
    for at, (name, offsets, tensor) in enumerate(targets):
        for number in index.tensors[name].files_of((offsets, tuple(tensor.shape))):
            targets_of[number].append(at)
    reads: _Reads = defaultdict(list)
    filled: list[list[Part]] = [[] for _ in targets]
    for number in sorted(targets_of):
        chunks = files.chunks(number)
        for at in targets_of[number]:
            name, offsets, tensor = targets[at]
            for chunk in chunks.get(name, ()):
                common = common_part((offsets, tuple(tensor.shape)), (chunk.offsets, chunk.shape))
                if common is not None:
                    part = inside(common, offsets)
                    reads[chunk].append((tensor[slices(*part)], slices(*inside(common, chunk.offsets))))
                    filled[at].append(part)
    for (name, offsets, tensor), parts in zip(targets, filled, strict=True):
        if not fill(tensor.shape, parts):
            what = f"chunks that do not fill {named(name)} {tuple(tensor.shape)} from {offsets}"
            raise unknown_content(files.folder.shown(INDEX_NAME), what)
    return reads


def _filled(buffer: Tensor, file: Source, path: str, position: int, crc32: int) -> Tensor:
    """Fills a buffer with the bytes at a position of a file, and verifies them."""
    data, filled = buffer.numpy().data, 0
    while filled < len(data):
        try:
            count = file.read_into(data[filled:], position + filled)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}; load another checkpoint") from error
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
