"""Reads tensors of a portable checkpoint into the parts that this rank holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import numpy as np
from torch import Tensor

from shardopt.checkpoint.data_file import DataFiles, rectangle
from shardopt.checkpoint.index import INDEX_NAME, Index, noticing_replacement, unknown_content
from shardopt.checkpoint.items import Chunks
from shardopt.checkpoint.rectangles import fill
from shardopt.checkpoint.saving import require_little_endian
from shardopt.checkpoint.storage import Folder
from shardopt.checkpoint.table import StoredChunk
from shardopt.checkpoint.wording import named
from shardopt.layout.partition import Part

#: A rectangle of a tensor to read into: the tensor's name, offsets, and the memory.
_Target = tuple[str, tuple[int, ...], Tensor]


def read_tensors(folder: Folder, index: Index, tensors: Mapping[str, Chunks]) -> None:
    """Reads tensors of a checkpoint into chunks of the saved dtypes and shapes. Each stored chunk is read once.

    The tensors may have changed in part if reading fails.

    Raises:
        CheckpointError: the checkpoint is damaged, or the machine is big-endian.
    """
    require_little_endian()
    with noticing_replacement(folder, index), DataFiles(folder, index) as files:
        reads = find_reads(files, index, tensors)
        with files.chunks(reads) as chunks_read:
            for number, chunk, data in chunks_read:
                for (_, offsets, tensor), part in reads[number, chunk]:
                    values = data.view(tensor.dtype).view(chunk.shape)
                    to = tensor[rectangle(_inside(part, offsets), part[1])]
                    to.copy_(values[rectangle(_inside(part, chunk.offsets), part[1])])


def find_reads(
    files: DataFiles, index: Index, tensors: Mapping[str, Chunks]
) -> dict[tuple[int, StoredChunk], list[tuple[_Target, Part]]]:
    """The chunks to read, with the numbers of their files, and the part of each chunk for each rectangle to read.

    Opens the files that have any of them, and reads their tables.

    Raises:
        CheckpointError: a file or its table cannot be read or is damaged, or chunks do not fill what is to be read.
    """
    targets = [(name, offsets, tensor) for name, of in tensors.items() for offsets, tensor in of.held.items()]
    of_file: dict[int, list[_Target]] = defaultdict(list)
    for target in targets:
        name, offsets, tensor = target
        for number in index.tensors[name].files_of((offsets, tuple(tensor.shape))):
            of_file[number].append(target)
    reads: dict[tuple[int, StoredChunk], list[tuple[_Target, Part]]] = defaultdict(list)
    filled: dict[tuple[str, tuple[int, ...]], list[Part]] = defaultdict(list)
    for number, its_targets in sorted(of_file.items()):
        chunks_of = _chunks_in(files, index, number, {name for name, _, _ in its_targets})
        for target in its_targets:
            name, offsets, tensor = target
            for chunk in chunks_of[name]:
                part = _common_part((offsets, tuple(tensor.shape)), (chunk.offsets, chunk.shape))
                if part is not None:
                    reads[number, chunk].append((target, part))
                    filled[name, offsets].append((_inside(part, offsets), part[1]))
    for name, offsets, tensor in targets:
        shape = tuple(tensor.shape)
        if not fill(shape, filled[name, offsets]):
            what = f"chunks that do not fill {named(name)} {shape} from {offsets}"
            raise unknown_content(files.folder.shown(INDEX_NAME), what)
    return reads


def _chunks_in(files: DataFiles, index: Index, number: int, names: Collection[str]) -> dict[str, list[StoredChunk]]:
    """The chunks that a file has of tensors of these names."""
    files[number]  # opens it, so that its table and its chunks are of one file
    table = files.table(number)
    name = index.file_name(number)
    order = np.argsort(table.tensor, kind="stable")
    in_order = table.tensor[order]
    chunks_of = {}
    for tensor in names:
        begin, end = np.searchsorted(in_order, [files.numbers[tensor], files.numbers[tensor] + 1])
        stored = index.tensors[tensor]
        chunks_of[tensor] = table.chunks(order[begin:end], len(stored.shape), stored.dtype.itemsize, name)
    return chunks_of


def _common_part(one: Part, other: Part) -> Part | None:
    """The rectangle that two rectangles have in common; None if there is none."""
    corners = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(*one, *other, strict=True)]
    if any(low >= high for low, high in corners):
        return None
    return tuple(low for low, _ in corners), tuple(high - low for low, high in corners)


def _inside(part: Part, offsets: tuple[int, ...]) -> tuple[int, ...]:
    """Where a rectangle begins in one that begins at these offsets."""
    return tuple(a - b for a, b in zip(part[0], offsets, strict=True))
