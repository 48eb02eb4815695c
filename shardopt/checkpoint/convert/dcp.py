"""Folders of torch.distributed.checkpoint with a model and, by ``get_state_dict``, its optimizer."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from shardopt.checkpoint.convert.dcp_metadata import METADATA, WRITTEN, Index, metadata_in
from shardopt.checkpoint.convert.pickled import refusing
from shardopt.checkpoint.convert.state_dicts import is_whole_tensor, take_state_dicts
from shardopt.checkpoint.convert.stream import (
    Checkpoint,
    LazyTensor,
    elements,
    ranges,
    rebuilt,
    refuse_quantize_state,
)
from shardopt.checkpoint.convert.torch_zip import torch_objects
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.rectangles import fill
from shardopt.checkpoint.storage import PathLike, folder_at, sync_folder
from shardopt.checkpoint.wording import kind_of, named, shown
from shardopt.layout.partition import rectangles_of_range

_DATA_FILE = "__0_0.distcp"
_MODEL = ("model", "model_state_dict", "app")
_OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict")
_MOST_BYTES = 1 << 26  # of a value that is no tensor
_CHUNK_NUMEL = 1 << 21
_RECENT = 4  # chunks that stay mapped: a parameter's state has as many entries
_MOST_NESTED = 16  # dicts within extra values


class _Chunk(NamedTuple):
    """A rectangle of a tensor, and where torch.save wrote it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    length: int


def read_dcp(path: PathLike, optimizer: str | None) -> Checkpoint:
    """A folder of ``dcp.save({"model": ..., "optimizer": ...})`` with the results of ``get_state_dict``.

    Nothing is unpickled but DCP's own classes, and data are read when they are needed. DCP has no checksums.

    Args:
        path: the folder.
        optimizer: the optimizer's class; None to find it by options and entries.

    Raises:
        CheckpointError: the folder is damaged, has anything else, or is of an unknown optimizer.
    """
    folder = Path(path)
    text = str(folder / METADATA)
    content = metadata_in(folder)
    value_in = lru_cache(_RECENT)(_value_in)  # consecutive pieces often are of one chunk
    checkpoint = Checkpoint(os.fspath(path))
    model: dict[str, LazyTensor] = {}
    states: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    has_optimizer = False
    for key, where in content.planner_data.items():
        with refusing(text, WRITTEN):
            value = _value(content, key, folder, value_in)
        path_in = where if isinstance(where, tuple) and where else (where,)
        match path_in:
            case (first, *names) if first in _MODEL and names and isinstance(value, LazyTensor):
                model[".".join(map(str, names))] = value
            case (first, "state", str(name), str(entry)) if first in _OPTIMIZER:
                states.setdefault(name, {})[entry] = value
            case (first, "param_groups", int(index), str(option)) if first in _OPTIMIZER:
                groups.setdefault(index, {})[option] = value
            case (first, *rest) if first in _OPTIMIZER:
                raise CheckpointError(
                    f"{text}: got {named('.'.join(map(str, rest)))} of an optimizer, expected state and param_groups; "
                    "save what get_state_dict gives without flatten_optimizer_state_dict"
                )
            case (first, *_) if first in _MODEL:
                checkpoint.left_out.append(named(key))
            case (str(name),) if isinstance(value, LazyTensor):
                checkpoint.tensors[f"extra.{name}"] = value
            case _ if not _take_extra(checkpoint.extra, path_in, value):
                checkpoint.left_out.append(named(key))
        has_optimizer |= path_in[0] in _OPTIMIZER
    if not model:
        raise CheckpointError(f'{text}: got no model, expected {{"model": ..., "optimizer": ...}}; save it so')
    in_order = [groups[index] for index in sorted(groups)] if has_optimizer else []
    if not has_optimizer:
        checkpoint.tensors |= {f"model.{name}": tensor for name, tensor in model.items()}
        return checkpoint
    for index, group in enumerate(in_order):
        if "params" not in group:
            raise CheckpointError(f"{text}: param group {index}: got no params, expected names; save it again")
    take_state_dicts(checkpoint, model, states, in_order, optimizer)
    return checkpoint


def _value(content: metadata.Metadata, key: str, folder: Path, value_in: Callable[..., Any]) -> Any:
    """A tensor, or another value, which is read at once."""
    path = str(folder / METADATA)
    described = content.state_dict_metadata[key]
    if type(described) is metadata.BytesStorageMetadata:
        chunk = _chunk(content, Index(key), (), (), path)
        if chunk.length > _MOST_BYTES:
            raise CheckpointError(f"{path}: got {chunk.length} bytes for {named(key)}, expected at most {_MOST_BYTES}")
        return _value_in(folder, chunk)
    if type(described) is not metadata.TensorStorageMetadata:
        raise TypeError(type(described).__name__)
    dtype, shape = described.properties.dtype, _sizes(described.size)
    if type(dtype) is not torch.dtype:
        raise TypeError(f"dtype {shown(dtype)}")
    chunks = []
    for chunk_metadata in described.chunks:
        index = Index(key, torch.Size(chunk_metadata.offsets))
        chunks.append(_chunk(content, index, _sizes(chunk_metadata.offsets), _sizes(chunk_metadata.sizes), path))
    if not fill(shape, [(chunk.offsets, chunk.shape) for chunk in chunks]):
        raise CheckpointError(f"{path}: got chunks that do not fill {named(key)} {shown(shape)}, expected all of it")
    readers = [((chunk.offsets, chunk.shape), _reader(folder, chunk, dtype, value_in)) for chunk in chunks]
    return rebuilt(dtype, shape, readers)


def _chunk(
    content: metadata.Metadata,
    index: Index,
    offsets: tuple[int, ...],
    shape: tuple[int, ...],
    path: str,
) -> _Chunk:
    stored = content.storage_data.get(index)
    if (
        type(stored) is not _StorageInfo
        or not isinstance(stored.relative_path, str)
        or os.path.basename(stored.relative_path) != stored.relative_path
        or stored.relative_path in ("", ".", "..")
        or getattr(stored, "transform_descriptors", None)
    ):
        raise CheckpointError(
            f"{path}: got {shown(stored)} for {named(index.fqn)}, expected a file in the folder, written without "
            "extensions; save it again"
        )
    begin, length = _sizes((stored.offset, stored.length))
    return _Chunk(offsets, shape, stored.relative_path, begin, length)


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in sizes):
        raise TypeError(f"sizes {shown(sizes)}")
    return sizes


def _value_in(folder: Path, chunk: _Chunk) -> Any:
    """The tensor or the plain value that torch.save wrote, mapped into memory."""
    path = folder / chunk.file
    try:
        folder_at(folder).size(chunk.file)  # raises if it is no regular file
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be opened: {error.strerror or error}; load another checkpoint"
        ) from error
    try:
        with refusing(str(path), WRITTEN):
            return torch_objects(descriptor, chunk.begin, chunk.length, {})
    finally:
        os.close(descriptor)


def _reader(folder: Path, chunk: _Chunk, dtype: torch.dtype, value_in: Callable[..., Any]) -> Callable[..., Tensor]:
    def read(first: int, end: int) -> Tensor:
        tensor = value_in(folder, chunk)
        if not is_whole_tensor(tensor) or (tensor.dtype, tuple(tensor.shape)) != (dtype, chunk.shape):
            got = f"{kind_of(tensor)} {shown(tuple(tensor.shape))}" if isinstance(tensor, Tensor) else kind_of(tensor)
            raise CheckpointError(
                f"{folder / chunk.file}: got {got} at byte {chunk.begin}, expected a dense tensor of {dtype} "
                f"{shown(chunk.shape)} as {METADATA} says; save it again"
            )
        return elements(tensor, first, end).clone()  # aligned, and not within a mapping that must not be written to

    return read


def write_dcp(checkpoint: Checkpoint, path: PathLike, numel: int, progress: Callable[[int], object]) -> None:
    """Writes a folder as ``dcp.save({"model": ..., "optimizer": ...})`` does with the results of ``get_state_dict``.

    Args:
        checkpoint: what to write.
        path: the folder, where nothing is yet.
        numel: elements of a piece.
        progress: called with the bytes of each piece that was written.

    Raises:
        CheckpointError: the checkpoint could not be read, or the format has no place for it.
        OSError: the system fails to write.
    """
    refuse_quantize_state(checkpoint, "load it, and save it with torch.distributed.checkpoint")
    folder = Path(path)
    folder.mkdir()
    with open(folder / _DATA_FILE, "xb") as file:
        content = _write_data(checkpoint, file, numel, progress)
        file.flush()
        os.fsync(file.fileno())
    with open(folder / METADATA, "xb") as file:
        pickle.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _write_data(
    checkpoint: Checkpoint, file: BinaryIO, numel: int, progress: Callable[[int], object]
) -> metadata.Metadata:
    tensors: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    stored: dict[metadata.MetadataIndex, Any] = {}

    def add(key: str, offsets: tuple[int, ...] | None, value: Any) -> None:
        begin, written = file.tell(), io.BytesIO()
        torch.save(value, written)
        file.write(written.getbuffer())
        index = metadata.MetadataIndex(key, offsets, len(tensors[key].chunks) if offsets is not None else None)
        stored[index] = _StorageInfo(_DATA_FILE, begin, file.tell() - begin)

    described = checkpoint.described
    for key, (dtype, shape) in described.items():
        paths[_dcp_key(key)] = _path_of(key)
        properties = metadata.TensorProperties(dtype=dtype)
        tensors[_dcp_key(key)] = metadata.TensorStorageMetadata(properties, torch.Size(shape), [])
        if 0 in shape:
            zeros = (0,) * len(shape)
            add(_dcp_key(key), zeros, torch.empty(shape, dtype=dtype, device="cpu"))
            chunk = metadata.ChunkStorageMetadata(torch.Size(zeros), torch.Size(shape))
            tensors[_dcp_key(key)].chunks.append(chunk)
    for key, first, data in checkpoint.pieces(numel):
        shape = described[key].shape
        for begin, stop in ranges(shape, _CHUNK_NUMEL, first, first + data.numel()):
            at = begin - first
            for offsets, extents in rectangles_of_range(shape, begin, stop):
                size = math.prod(extents)
                add(_dcp_key(key), offsets, data[at : at + size].reshape(extents).clone())
                chunk = metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(extents))
                tensors[_dcp_key(key)].chunks.append(chunk)
                at += size
        progress(data.nbytes)
    values: dict[tuple[str | int, ...], Any] = dict(_flattened((), checkpoint.extra))
    for index, group in enumerate(checkpoint.groups):
        options = {key: tuple(x) if isinstance(x, list) else x for key, x in group["options"].items()}
        for key, value in {**options, "params": list(group["parameters"])}.items():
            values["optimizer", "param_groups", index, key] = value
    for path, value in values.items():
        key = ".".join(map(str, path))
        if key in paths:  # DCP has names with dots in place of nested dicts
            checkpoint.left_out.append(f"a second value that would be called {named(key)}")
            continue
        tensors[key], paths[key] = metadata.BytesStorageMetadata(), path
        add(key, None, value)
    return metadata.Metadata(tensors, paths, stored, metadata.StorageMeta())


def _path_of(key: str) -> tuple[str | int, ...]:
    kind, _, name = key.partition(".")
    if kind == "optimizer":
        name, _, entry = name.rpartition(".")
        return "optimizer", "state", name, entry
    return ("model", name) if kind == "model" else (name,)


def _dcp_key(key: str) -> str:
    return ".".join(map(str, _path_of(key)))


def _flattened(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values in nested dicts and their paths, as torch.distributed.checkpoint flattens them."""
    if isinstance(value, dict) and (value or not path):
        for name, item in value.items():
            yield from _flattened((*path, name), item)
    else:
        yield path, value


def _take_extra(extra: dict[str, Any], path: tuple[Any, ...], value: Any) -> bool:
    """Puts a value back into nested dicts, which DCP flattens. False if JSON cannot hold it there."""
    try:
        plain = json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):  # TypeError: a tensor within a dict, too
        return False
    if len(path) > _MOST_NESTED or not all(isinstance(name, str) for name in path):
        return False
    for name in path[:-1]:
        extra = extra.setdefault(name, {})
        if not isinstance(extra, dict):
            return False
    return extra.setdefault(path[-1], plain) is plain
