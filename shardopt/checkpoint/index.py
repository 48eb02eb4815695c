"""What stands in a checkpoint: ``checkpoint.json``, whose appearance in the folder makes the checkpoint.

It is JSON, for anything to read::

    {"format": "shardopt", "format_version": 1,
    "header": {...},
    "files": {"8c5d0e6f1a2b3c4d-0.bin": 8192},
    "tensors": {
    "weight": {"dtype": "float32", "shape": [32, 64], "chunks": [{"offsets": [0, 0], "shape": [32, 64],
        "file": "8c5d0e6f1a2b3c4d-0.bin", "position": 0, "bytes": 8192, "crc32": 1234567890}]}},
    "crc32": "0123abcd"}

``files`` has the length of each data file in bytes. The last line is the CRC-32 of all that stands before it. The bytes
of a chunk are its elements in row-major order, little-endian.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardopt.checkpoint.errors import CheckpointError

INDEX_NAME = "checkpoint.json"
FORMAT = "shardopt"
FORMAT_VERSION = 1

_DATA_FILE = re.compile(r"[0-9a-f]{16}-[0-9]+\.bin")
_UNFINISHED_INDEX = re.compile(re.escape(INDEX_NAME) + r"\.[0-9a-f]{16}")
_LAST_LINE = re.compile(rb',\n"crc32": "([0-9a-f]{8})"}\n\Z')


class StoredChunk(NamedTuple):
    """A rectangle of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    position: int  # of its first byte in the file
    bytes: int
    crc32: int


class StoredTensor(NamedTuple):
    """A tensor in a checkpoint: its global shape, and the rectangles that fill it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[StoredChunk]


class Index(NamedTuple):
    """The content of ``checkpoint.json``."""

    header: dict[str, Any]
    files: dict[str, int]
    tensors: dict[str, StoredTensor]


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header of the checkpoint in a folder.

    Raises:
        CheckpointError: there is no checkpoint, or its index is damaged or of a newer format.
    """
    return load_index(Path(path)).header


def read_index(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of the checkpoint in a folder, by name.

    Raises:
        CheckpointError: there is no checkpoint, or its index is damaged or of a newer format.
    """
    return load_index(Path(path)).tensors


def load_index(folder: Path) -> Index:
    """Reads ``checkpoint.json``.

    Raises:
        CheckpointError: there is none, or it is damaged or of a newer format.
    """
    path = folder / INDEX_NAME
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(_why_unreadable(path, error)) from error
    content = _verified(path, text)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: got format version {version}, expected {FORMAT_VERSION}; install the version of shardopt that "
            "saved this checkpoint, or a newer one"
        )
    try:
        files = dict(content["files"])
        tensors = {name: _tensor(stored, files) for name, stored in content["tensors"].items()}
        return Index(content["header"], files, tensors)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: got content that no version of shardopt writes: {error!r}") from error


def dump_index(index: Index) -> bytes:
    """The content of ``checkpoint.json``, one line per tensor."""
    tensors = ",\n".join(f"{json.dumps(name)}: {json.dumps(_plain(tensor))}" for name, tensor in index.tensors.items())
    text = (
        f'{{"format": {json.dumps(FORMAT)}, "format_version": {FORMAT_VERSION},\n'
        f'"header": {json.dumps(index.header)},\n'
        f'"files": {json.dumps(index.files)},\n'
        f'"tensors": {{\n{tensors}}}'
    ).encode()
    return text + f',\n"crc32": "{zlib.crc32(text):08x}"}}\n'.encode()


def remove_strays(folder: Path, keep: Collection[str]) -> None:
    """Removes the files of earlier saves, and of saves that died: those that have our names and are not to be kept.

    Those that cannot be removed are left to the next save.
    """
    for path in folder.iterdir():
        ours = _DATA_FILE.fullmatch(path.name) or _UNFINISHED_INDEX.fullmatch(path.name)
        if ours and path.name not in keep:
            with suppress(OSError):
                path.unlink()


def _verified(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON of an index of ours that has not changed since it was written."""
    last_line = _LAST_LINE.search(text)
    if last_line is not None and zlib.crc32(text[: last_line.start()]) == int(last_line[1], 16):
        content = json.loads(text)
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return content
    elif last_line is not None or FORMAT.encode() in text[:32]:
        raise CheckpointError(
            f"{path}: its content does not have the checksum in it, so it was damaged after it was saved; load another "
            "checkpoint"
        )
    raise CheckpointError(f"{path}: got a file of another kind, expected the index of a checkpoint of shardopt")


def _why_unreadable(path: Path, error: OSError) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"{folder}: there is no such folder, expected one with a checkpoint of shardopt; check the path"
    if path.exists():
        return f"{path}: cannot be read: {error}"
    if any(_DATA_FILE.fullmatch(entry.name) for entry in folder.iterdir()):
        return f"{folder}: got data without {INDEX_NAME}: saving it was never finished; load another checkpoint"
    return f"{folder}: there is no {INDEX_NAME} in it, expected a checkpoint of shardopt; check the path"


def _plain(tensor: StoredTensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": tensor.shape, "chunks": [chunk._asdict() for chunk in tensor.chunks]}


def _tensor(stored: Mapping[str, Any], files: Mapping[str, int]) -> StoredTensor:
    dtype = getattr(torch, stored["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {dtype}")
    shape = tuple(stored["shape"])
    chunks = []
    for fields in stored["chunks"]:
        chunk = StoredChunk(**fields)._replace(offsets=tuple(fields["offsets"]), shape=tuple(fields["shape"]))
        inside = chunk.position + chunk.bytes <= files[chunk.file] and _DATA_FILE.fullmatch(chunk.file)
        if not inside or chunk.bytes != math.prod(chunk.shape) * dtype.itemsize:
            raise ValueError(f"chunk {chunk}")
        chunks.append(chunk)
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"chunks that do not fill {shape}")
    return StoredTensor(dtype, shape, chunks)
