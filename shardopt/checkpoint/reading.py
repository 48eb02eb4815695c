"""Reads tensors of a portable checkpoint into the parts that this rank holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from torch import Tensor

from shardopt.checkpoint.data_file import DataFiles, rectangle
from shardopt.checkpoint.index import INDEX_NAME, Index, load_index, noticing_replacement, unknown_content
from shardopt.checkpoint.items import Chunks
from shardopt.checkpoint.rectangles import fill
from shardopt.checkpoint.saving import require_little_endian
from shardopt.checkpoint.storage import Folder, PathLike, folder_at
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
                    to = tensor[rectangle(inside(part, offsets), part[1])]
                    to.copy_(values[rectangle(inside(part, chunk.offsets), part[1])])


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
                part = common_part((offsets, tuple(tensor.shape)), (chunk.offsets, chunk.shape))
                if part is not None:
                    reads[number, chunk].append((target, part))
                    filled[name, offsets].append((inside(part, offsets), part[1]))
    for name, offsets, tensor in targets:
        _demand_filled(files.folder, name, tuple(tensor.shape), filled[name, offsets], f" from {offsets}")
    return reads


def stored_chunks(folder: Folder, index: Index) -> dict[str, list[tuple[int, StoredChunk]]]:
    """All chunks of a checkpoint with the numbers of their files, by tensor: from the tables of all files.

    Raises:
        CheckpointError: a table cannot be read or is damaged, or the chunks of a tensor do not fill it.
    """
    chunks_of: dict[str, list[tuple[int, StoredChunk]]] = {name: [] for name in index.tensors}
    with DataFiles(folder, index) as files:
        for number in [number for number, stored in enumerate(index.files) if stored is not None]:
            for name, chunks in _chunks_in(files, index, number, chunks_of).items():
                chunks_of[name] += [(number, chunk) for chunk in chunks]
    for name, numbered in chunks_of.items():
        _demand_filled(folder, name, index.tensors[name].shape, [(chunk.offsets, chunk.shape) for _, chunk in numbered])
    return chunks_of


def _demand_filled(folder: Folder, name: str, shape: tuple[int, ...], parts: Sequence[Part], where: str = "") -> None:
    if not fill(shape, parts):
        raise unknown_content(folder.shown(INDEX_NAME), f"chunks that do not fill {named(name)} {shape}{where}")


def read_index(path: PathLike) -> dict[str, list[StoredChunk]]:
    """The chunks of each tensor of the checkpoint in a folder, or at a URL, by name.

    Raises:
        CheckpointError: there is no checkpoint, or its index or a table is damaged or of another format version.
    """
    folder = folder_at(path)
    chunks = stored_chunks(folder, load_index(folder))
    return {name: sorted(chunk for _, chunk in of_tensor) for name, of_tensor in chunks.items()}


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


def common_part(one: Part, other: Part) -> Part | None:
    """The rectangle that two rectangles have in common; None if there is none."""
    corners = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(*one, *other, strict=True)]
    if any(low >= high for low, high in corners):
        return None
    return tuple(low for low, _ in corners), tuple(high - low for low, high in corners)


def inside(part: Part, offsets: tuple[int, ...]) -> tuple[int, ...]:
    """Where a rectangle begins in one that begins at these offsets."""
    return tuple(a - b for a, b in zip(part[0], offsets, strict=True))
