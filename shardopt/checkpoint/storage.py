"""The storage of the portable checkpoint, for torch.distributed.checkpoint (DCP).

DCP's own storage unpickles its metadata, notices no damage, and destroys a folder's previous checkpoint before the new
one is complete. Here a checkpoint is a folder of data files and ``checkpoint.json``
(:mod:`shardopt.checkpoint.index`), which one rename puts in place once all data are on the disk. The previous
checkpoint stays loadable until then, whatever happens. All bytes are verified by their checksums before use. All ranks
must see the folder. Only one save at a time writes into the folder: the coordinating rank holds ``checkpoint.lock``
(:mod:`shardopt.checkpoint.folder_lock`).
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardopt.checkpoint.data_file import (
    DataFileWriter,
    check_lengths,
    make_folder,
    opened,
    read_chunks,
    rectangle,
    removed_on_failure,
    sync_folder,
)
from shardopt.checkpoint.errors import CheckpointError, plain_errors
from shardopt.checkpoint.folder_lock import FolderLock
from shardopt.checkpoint.groups import union
from shardopt.checkpoint.index import (
    INDEX_NAME,
    Index,
    StoredChunk,
    StoredTensor,
    dump_index,
    load_index,
    noticing_replacement,
    read_header,
    read_index,
    remove_strays,
)
from shardopt.checkpoint.rectangles import Rectangle, fill
from shardopt.checkpoint.replicas import Digests, ReplicaPlanner, check_digests

__all__ = [
    "CheckpointError",
    "PortableReader",
    "PortableWriter",
    "StoredChunk",
    "StoredTensor",
    "plain_errors",
    "read_header",
    "read_index",
]


class PortableWriter(StorageWriter):
    """Saves tensors, in ``Chunks`` or plain, into a folder. For ``dcp.save``, and with a ``Stager`` ``dcp.async_save``.

    Args:
        path: the folder, which is made if necessary. A checkpoint in the folder is replaced.
        header: a dict that JSON can hold, on every rank. The first rank's header is saved, with the ``param_groups`` of
            all ranks.

    Raises:
        TypeError: JSON cannot hold the header.
    """

    def __init__(self, path: str | os.PathLike[str], header: dict[str, Any]) -> None:
        _require_little_endian()
        self._folder = Path(path)
        self._header: dict[str, Any] = json.loads(json.dumps(header))
        self._token = ""
        self._data_file: Path | None = None
        self._lock = FolderLock(self._folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)
            self._lock = FolderLock(self._folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._data_file = None
        if not kwargs.get("use_collectives", True):
            raise CheckpointError("got use_collectives=False, expected True: the ranks save one checkpoint together")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(
                    f"got {item.index.fqn}, which is no tensor, expected tensors only; put what JSON can hold into the "
                    "header"
                )
        make_folder(self._folder)
        groups = json.dumps(self._header.get("param_groups", [])).encode()
        return replace(plan, storage_data=zlib.compress(groups))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        _check_filled(itertools.chain.from_iterable(plan.items for plan in plans))
        if "param_groups" in self._header:
            of_ranks = dict.fromkeys(plan.storage_data for plan in plans)  # mostly the same on all ranks
            self._header["param_groups"] = union([json.loads(zlib.decompress(groups)) for groups in of_ranks])
        self._lock.acquire()
        in_use = self._files_in_use()
        if in_use is not None:
            remove_strays(self._folder, in_use)  # a save that failed on a full disk may have left files
        self._token = secrets.token_hex(8)
        return [replace(plan, storage_data=f"{self._token}-{rank}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        digests = planner.digests() if isinstance(planner, ReplicaPlanner) else {}
        results: list[Any] = self._write(plan, planner) if plan.items else []
        done: Future[list[WriteResult]] = Future()
        done.set_result([_Results(results, digests)])  # type: ignore[list-item]  # DCP hands it to finish() as it is
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        of_ranks = cast("list[_Results]", list(itertools.chain.from_iterable(results)))
        check_digests([rank.digests for rank in of_ranks])
        chunks: dict[str, list[StoredChunk]] = defaultdict(list)
        files: dict[str, int] = defaultdict(int)
        for result in itertools.chain.from_iterable(rank.written for rank in of_ranks):
            for chunk in result.storage_data:
                chunks[result.index.fqn].append(chunk)
                files[chunk.file] = max(files[chunk.file], chunk.position + chunk.bytes)
        check_lengths(self._folder, files)
        tensors = {
            name: StoredTensor(stored.properties.dtype, tuple(stored.size), sorted(chunks[name]))
            for name, stored in sorted(metadata.state_dict_metadata.items())
            if isinstance(stored, TensorStorageMetadata)
        }
        self._commit(dump_index(Index(self._header, files, tensors)))
        remove_strays(self._folder, files)
        self._lock.release()

    def discard(self) -> None:
        """Removes this rank's data file after a save that failed on another rank, and releases the lock.

        Without this call, the next save into the folder removes the file.
        """
        try:
            if self._data_file is not None:
                in_use = self._files_in_use()
                if in_use is not None and self._data_file.name not in in_use:
                    with suppress(OSError):
                        self._data_file.unlink()
        finally:
            self._lock.release()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _files_in_use(self) -> dict[str, int] | None:
        """The data files of the checkpoint in the folder; None if the checkpoint cannot be read."""
        try:
            return load_index(self._folder).files
        except CheckpointError as error:
            return {} if isinstance(error.__cause__, FileNotFoundError) else None

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        self._data_file = self._folder / plan.storage_data
        file = DataFileWriter(self._data_file)
        chunks = []
        for item in plan.items:
            assert item.tensor_data is not None
            corner, shape = tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)
            data = cast("Callable[[], Tensor]", partial(planner.resolve_data, item))
            chunks.append(file.add(data, corner, shape, item.tensor_data.properties.dtype.itemsize))
        stored = file.write()
        return [
            WriteResult(item.index, sum(chunk.bytes for chunk in stored[places]), stored[places])
            for item, places in zip(plan.items, chunks, strict=True)
        ]

    def _commit(self, text: bytes) -> None:
        path = self._folder / INDEX_NAME
        unfinished = self._folder / f"{INDEX_NAME}.{self._token}"
        with removed_on_failure(unfinished, len(text)):
            with unfinished.open("xb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        sync_folder(self._folder)


class _Results(NamedTuple):
    """One rank's results of a save."""

    written: list[WriteResult]
    digests: Digests


class PortableReader(StorageReader):
    """Loads checkpoints of :class:`PortableWriter`. For ``dcp.load``.

    Each rank reads each chunk that overlaps its parts once. Tensors are loaded into tensors of the saved dtype, which
    may have changed in part if loading fails.

    Args:
        path: the folder.
        index: the content of the folder's ``checkpoint.json``, if that file was read already.
    """

    def __init__(self, path: str | os.PathLike[str], index: Index | None = None) -> None:
        _require_little_endian()
        self._folder = Path(path)
        self._given = self._index = index
        self._error: CheckpointError | None = None

    @property
    def header(self) -> dict[str, Any]:
        """The checkpoint's header."""
        return self._loaded().header

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._index, self._error = self._given, None
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors of the checkpoint. DCP drops errors raised here, so the next method raises them."""
        self._error = None
        try:
            self._index = self._given or load_index(self._folder)
        except CheckpointError as error:
            self._error = error
            return Metadata({})
        return Metadata({name: _metadata(stored) for name, stored in self._index.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._loaded()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        index = self._loaded()
        reads: dict[str, dict[StoredChunk, list[tuple[ReadItem, Tensor]]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            stored = index.tensors[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            if target.dtype != stored.dtype:
                raise CheckpointError(
                    f"{self._folder}: got {item.dest_index.fqn} of {target.dtype} to load into, expected "
                    f"{stored.dtype} as saved; load into a tensor of that dtype, then convert"
                )
            assert item.storage_index.index is not None
            chunk = stored.chunks[item.storage_index.index]
            reads[chunk.file][chunk].append((item, target))
        with noticing_replacement(self._folder, index):
            check_lengths(self._folder, {file: index.files[file] for file in reads})
            with opened([self._folder / file for file in sorted(reads)]) as files:
                for file in files:
                    wanted = reads[file.path.name]
                    with read_chunks(file, wanted) as chunks:
                        for chunk, data in chunks:
                            for item, target in wanted[chunk]:
                                values = data.view(target.dtype).view(chunk.shape)
                                target.copy_(values[rectangle(item.storage_offsets, item.lengths)])
                                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _loaded(self) -> Index:
        if self._error is not None:
            raise self._error
        if self._index is None:
            self._index = load_index(self._folder)
        return self._index


def _check_filled(items: Iterable[WriteItem]) -> None:
    """Checks that the chunks to write fill every tensor, which DCP does not check for a single rank."""
    first: dict[str, TensorWriteData] = {}
    rectangles: dict[str, list[Rectangle]] = defaultdict(list)
    for item in items:
        data = item.tensor_data
        assert data is not None
        first.setdefault(item.index.fqn, data)
        rectangles[item.index.fqn].append((data.chunk.offsets, data.chunk.sizes))
    for name, data in first.items():
        if not fill(data.size, rectangles[name]):
            raise CheckpointError(
                f"got chunks of {name} to save that do not fill its shape {tuple(data.size)} or overlap, expected each "
                "element once; save on all ranks that have a part of it"
            )


def _metadata(stored: StoredTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=stored.dtype),
        torch.Size(stored.shape),
        [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in stored.chunks],
    )


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise CheckpointError(
            "got a big-endian machine, expected a little-endian one, whose byte order checkpoints have"
        )
