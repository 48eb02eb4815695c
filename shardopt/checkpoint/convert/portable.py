"""Portable checkpoints: read and written in pieces."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import lru_cache
from typing import Any

from torch import Tensor

from shardopt.checkpoint.convert.recoding import add_states, of_names
from shardopt.checkpoint.convert.stream import Checkpoint, LazyTensor, rebuilt
from shardopt.checkpoint.data_file import DataFiles, Part, write_data_file
from shardopt.checkpoint.groups import checked_groups
from shardopt.checkpoint.index import (
    INDEX_NAME,
    Index,
    StoredTensor,
    data_file_name,
    dump_index,
    load_index,
    noticing_replacement,
)
from shardopt.checkpoint.reading import stored_chunks
from shardopt.checkpoint.saving import require_little_endian
from shardopt.checkpoint.storage import Folder
from shardopt.checkpoint.table import StoredChunk
from shardopt.layout.partition import GridPartition, rectangles_of_range

_RECENT = 4  # chunks in memory: a parameter's state has as many entries


def read_portable(folder: Folder, closing: ExitStack) -> Checkpoint:
    """A portable checkpoint. Data are read, and verified by their checksums, when they are needed.

    Args:
        folder: its folder.
        closing: closes the files.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    index = load_index(folder)
    tensors = lazy_tensors(folder, index, closing)
    extra = index.header.get("extra", {})
    checkpoint = Checkpoint(str(folder), extra=dict(extra), aliases=index.header.get("aliases", {}))
    checkpoint.tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer.")}
    if "param_groups" in index.header:
        checkpoint.optimizer = index.header.get("optimizer")
        checkpoint.groups = checked_groups(str(folder), index.header["param_groups"])
        add_states(checkpoint, of_names(tensors))
    return checkpoint


def lazy_tensors(folder: Folder, index: Index, closing: ExitStack) -> dict[str, LazyTensor]:
    """The tensors of a portable checkpoint by name, verified when they are read.

    Args:
        folder: its folder.
        index: its index.
        closing: closes the files.

    Raises:
        CheckpointError: a table is damaged.
    """
    require_little_endian()
    with noticing_replacement(folder, index):
        chunks = stored_chunks(folder, index)
        files = closing.enter_context(DataFiles(folder, index))
        recent = lru_cache(_RECENT)(files.chunk)  # consecutive pieces often are of one chunk
        return {key: _lazy(files, recent, index, key, of_tensor) for key, of_tensor in chunks.items()}


def write_portable(checkpoint: Checkpoint, folder: Folder, numel: int, progress: Callable[[int], object]) -> None:
    """Writes a portable checkpoint with a single data file.

    Args:
        checkpoint: what to write.
        folder: the folder, where nothing is yet.
        numel: elements of a piece.
        progress: called with the bytes of each piece that was written.

    Raises:
        CheckpointError: the checkpoint could not be read.
        OSError: the system fails to write.
    """
    require_little_endian()
    header: dict[str, Any] = {"extra": checkpoint.extra}
    if checkpoint.aliases:
        header["aliases"] = checkpoint.aliases
    if checkpoint.optimizer is not None:
        header |= {"optimizer": checkpoint.optimizer, "param_groups": checkpoint.groups}
    described = checkpoint.described
    tensors = {key: StoredTensor(*described[key], 0, GridPartition()) for key in sorted(described)}
    token = secrets.token_hex(8)
    folder.make()
    try:
        stored = write_data_file(folder, data_file_name(token, 0), _parts(checkpoint, numel, progress))
        folder.put(INDEX_NAME, f"{INDEX_NAME}.{token}", dump_index(Index(header, token, [stored], tensors)))
    except BaseException:
        with suppress(OSError):
            folder.remove(data_file_name(token, 0))
        folder.remove_if_empty()
        raise


def _parts(checkpoint: Checkpoint, numel: int, progress: Callable[[int], object]) -> Iterator[Part]:
    """The rectangles of all tensors, read when they are needed."""
    described = checkpoint.described
    numbers = {key: number for number, key in enumerate(sorted(described))}
    for key, first, data in checkpoint.pieces(numel):
        at = 0
        for offsets, extents in rectangles_of_range(described[key].shape, first, first + data.numel()):
            end = at + math.prod(extents)
            yield numbers[key], offsets, data[at:end].reshape(extents)
            at = end
        progress(data.nbytes)


def _lazy(
    files: DataFiles,
    recent: Callable[[int, StoredChunk], Tensor],
    index: Index,
    key: str,
    chunks: list[tuple[int, StoredChunk]],
) -> LazyTensor:
    stored = index.tensors[key]

    def reader(number: int, chunk: StoredChunk) -> Callable[[int, int], Tensor]:
        def read(first: int, end: int) -> Tensor:
            with noticing_replacement(files.folder, index):
                return recent(number, chunk).view(stored.dtype)[first:end]

        return read

    parts = [((chunk.offsets, chunk.shape), reader(number, chunk)) for number, chunk in chunks]
    return rebuilt(stored.dtype, stored.shape, parts)
