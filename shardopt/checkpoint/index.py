"""The index of a checkpoint: ``checkpoint.json``, the last file of a save, which completes the checkpoint.

The file is JSON, so that any program can read it::

    {"format": "shardopt", "format_version": 1,
    "header": {...},
    "files": {"8c5d0e6f1a2b3c4d-0.bin": 8192},
    "tensors": {
    "weight": {"dtype": "float32", "shape": [32, 64], "chunks": [{"offsets": [0, 0], "shape": [32, 64],
        "file": "8c5d0e6f1a2b3c4d-0.bin", "position": 0, "bytes": 8192, "crc32": 1234567890}]}},
    "crc32": "0123abcd"}

``files`` has the length of each data file in bytes. The last line is the CRC-32 of all bytes before. The bytes of a
chunk are its elements in row-major order, little-endian. The chunks of a tensor cover each of its elements once; no two
chunks share bytes. ``header`` has ``extra`` (an object) and, with an optimizer, ``optimizer`` (the class's name)
and ``param_groups``, a list of ``{"parameters": [names], "options": {...}}``.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardopt.checkpoint.errors import CheckpointError, ReplacedError
from shardopt.checkpoint.own_files import open_own
from shardopt.checkpoint.rectangles import fill
from shardopt.checkpoint.wording import named, shown

INDEX_NAME = "checkpoint.json"
FORMAT = "shardopt"
FORMAT_VERSION = 1

_MAX_DIMS = 64  # of a torch.Tensor
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and not name.startswith("q")  # quantized tensors consist of more than elements
}

_DATA_FILE = re.compile(r"[0-9a-f]{16}-[0-9]{1,10}\.bin")
_UNFINISHED_INDEX = re.compile(re.escape(INDEX_NAME) + r"\.[0-9a-f]{16}")
_LAST_LINE = re.compile(rb',\n"crc32": "([0-9a-f]{8})"}\n\Z')


class StoredChunk(NamedTuple):
    """A rectangle of a tensor, and the location of its bytes."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    position: int  # offset of the first byte in the file
    bytes: int
    crc32: int


class StoredTensor(NamedTuple):
    """A tensor in a checkpoint: its global shape, and the rectangles that fill it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[StoredChunk]


class Index(NamedTuple):
    """The content of ``checkpoint.json``.

    Attributes:
        header: the header, JSON.
        files: the length of each data file in bytes.
        tensors: the tensors by name.
        crc32: the checksum in the last line; 0 if the index was not read from a file. Checkpoints saved into one folder
            differ in their checksums, because names of data files are random.
    """

    header: dict[str, Any]
    files: dict[str, int]
    tensors: dict[str, StoredTensor]
    crc32: int = 0


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
        CheckpointError: the folder has no ``checkpoint.json``, or the file is damaged or of a newer format.
    """
    path = folder / INDEX_NAME
    try:
        text = _read_file(path)
    except OSError as error:
        raise CheckpointError(_why_unreadable(path, error)) from error
    content, crc32 = _verified(path, text)
    version = content.get("format_version")
    if version != FORMAT_VERSION or type(version) is not int:
        raise CheckpointError(
            f"{path}: got format version {shown(version)}, expected {FORMAT_VERSION}; install the version of "
            "shardopt that saved this checkpoint, or a newer one"
        )
    try:
        files = {name: _size(length, name) for name, length in _mapping(content, "files").items()}
        for name in files:
            _demand(_DATA_FILE.fullmatch(name), f"data file {shown(name)}")
        tensors = {name: _tensor(name, stored) for name, stored in _mapping(content, "tensors").items()}
        _check_bytes(tensors, files)
        return Index(_checked_header(content), files, tensors, crc32)
    except _InvalidError as error:
        raise _unknown_content(path, str(error)) from None


@contextmanager
def noticing_replacement(folder: Path, index: Index) -> Iterator[None]:
    """Checks after a CheckpointError whether another save has replaced the checkpoint that is being loaded.

    Raises:
        ReplacedError: a CheckpointError was raised, and the folder now has a checkpoint with another index.
        CheckpointError: the original error, if the folder has the same checkpoint, or none that can be read.
    """
    try:
        yield
    except CheckpointError as error:
        try:
            replaced = load_index(folder).crc32 != index.crc32
        except CheckpointError:
            replaced = False
        if replaced:
            raise ReplacedError(
                f"{folder}: another checkpoint was saved there while this one was loaded; load again"
            ) from error
        raise


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
    """Removes files of earlier and of failed saves: files that have this format's names and are not in `keep`.

    Leaves files that cannot be removed to the next save.
    """
    for name in _names_in(folder):
        ours = _DATA_FILE.fullmatch(name) or _UNFINISHED_INDEX.fullmatch(name)
        if ours and name not in keep:
            with suppress(OSError):
                (folder / name).unlink()


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # files that cannot be listed do not matter here
        return []


def _verified(path: Path, text: bytes) -> tuple[dict[str, Any], int]:
    """The JSON content of an index and its checksum; raises CheckpointError if the checksum does not match."""
    last_line = _LAST_LINE.search(text)
    if last_line is not None and zlib.crc32(text[: last_line.start()]) == int(last_line[1], 16):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _unknown_content(path, type(error).__name__) from None
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return content, int(last_line[1], 16)
    elif last_line is not None or FORMAT.encode() in text[:32]:
        raise CheckpointError(
            f"{path}: its content does not have the checksum in it, so it was damaged after it was saved; load another "
            "checkpoint"
        )
    raise CheckpointError(f"{path}: got a file of another kind, expected the index of a checkpoint of shardopt")


def _read_file(path: Path) -> bytes:
    with open(open_own(path), "rb") as file:
        return file.read()


def _why_unreadable(path: Path, error: OSError) -> str:
    folder = path.parent
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{path}: cannot be read: {error}"
    if not os.path.isdir(folder):
        return f"{folder}: there is no such folder, expected one with a checkpoint of shardopt; check the path"
    if any(map(_DATA_FILE.fullmatch, _names_in(folder))):
        return f"{folder}: got data without {INDEX_NAME}: saving it was never finished; load another checkpoint"
    return f"{folder}: there is no {INDEX_NAME} in it, expected a checkpoint of shardopt; check the path"


def _plain(tensor: StoredTensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": tensor.shape, "chunks": [chunk._asdict() for chunk in tensor.chunks]}


def _unknown_content(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: got content that no version of shardopt writes: {what}; load another checkpoint")


class _InvalidError(Exception):
    """The index has content that no version of shardopt writes."""


def _demand(holds: object, what: str) -> None:
    if not holds:
        raise _InvalidError(what)


def _mapping(parent: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = parent.get(key)
    _demand(isinstance(value, dict), f"{key} that is no object")
    return value  # type: ignore[return-value]


def _size(value: object, of: str) -> int:
    """Checks a size of a tensor or a file: a whole number below 2**63."""
    is_size = type(value) is int and 0 <= value < 2**63
    _demand(is_size, f"a size of {named(of)} that is no whole number from 0 to 2**63 - 1")
    return value  # type: ignore[return-value]


def _sizes(value: object, of: str) -> tuple[int, ...]:
    _demand(isinstance(value, list) and len(value) <= _MAX_DIMS, f"sizes of {named(of)} that are no short list")
    return tuple(_size(each, of) for each in value)  # type: ignore[attr-defined]


def _tensor(name: str, stored: Any) -> StoredTensor:
    _demand(isinstance(stored, dict) and stored.keys() == {"dtype", "shape", "chunks"}, f"tensor {named(name)}")
    dtype = _DTYPES.get(stored["dtype"]) if isinstance(stored["dtype"], str) else None
    _demand(dtype is not None, f"a dtype of {named(name)}")
    assert dtype is not None
    shape = _sizes(stored["shape"], name)
    _demand(math.prod(max(extent, 1) for extent in shape) < 2**63, f"a shape of {named(name)}")
    _demand(isinstance(stored["chunks"], list), f"chunks of {named(name)}")
    chunks = [_chunk(name, fields, dtype.itemsize) for fields in stored["chunks"]]
    _demand(
        fill(shape, [(c.offsets, c.shape) for c in chunks]), f"chunks that do not fill {named(name)} {shown(shape)}"
    )
    return StoredTensor(dtype, shape, chunks)


def _chunk(name: str, fields: Any, itemsize: int) -> StoredChunk:
    _demand(isinstance(fields, dict) and fields.keys() == set(StoredChunk._fields), f"a chunk of {named(name)}")
    _demand(isinstance(fields["file"], str), f"a chunk of {named(name)}")
    offsets, shape = _sizes(fields["offsets"], name), _sizes(fields["shape"], name)
    numbers = [_size(fields[key], name) for key in ("position", "bytes", "crc32")]
    _demand(numbers[1] == math.prod(shape) * itemsize, f"a chunk of {named(name)} of {numbers[1]} bytes")
    return StoredChunk(offsets, shape, fields["file"], *numbers)


def _check_bytes(tensors: Mapping[str, StoredTensor], files: Mapping[str, int]) -> None:
    """Checks that chunks lie within their files and share no bytes."""
    of_file: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for name, stored in tensors.items():
        for chunk in stored.chunks:
            _demand(chunk.file in files, f"a chunk of {named(name)} in a file that is not listed")
            if chunk.bytes:
                of_file[chunk.file].append((chunk.position, chunk.position + chunk.bytes))
    for file, ranges in of_file.items():
        ranges.sort()
        _demand(not ranges or ranges[-1][1] <= files[file], f"chunks beyond the end of {file}")
        _demand(all(end <= begin for (_, end), (begin, _) in pairwise(ranges)), f"chunks of {file} that overlap")


def _checked_header(content: Mapping[str, Any]) -> dict[str, Any]:
    header = _mapping(content, "header")
    _demand(isinstance(header.get("extra", {}), dict), "extra that is no object")
    return header
