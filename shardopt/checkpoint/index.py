"""Reads and writes ``checkpoint.json``, the index of a checkpoint: a save writes the file last, to commit the rest.

The index is JSON, so that any program can read it. A tensor takes one line, however many data files have its shards::

    {"format": "shardopt", "format_version": 2,
    "header": {...},
    "token": "8c5d0e6f1a2b3c4d",
    "files": [[8192, 112, 1234567890], [8192, 112, 987654321]],
    "tensors": {
    "weight": {"dtype": "float32", "shape": [32, 64], "start": 0, "cuts": [[0, 2, 1]]}},
    "crc32": "0123abcd"}

Rank ``number`` of the save wrote the data file ``<token>-<number>.bin``. ``files`` has its sizes by number: the bytes
of chunks, the bytes of the table of chunks behind them (:mod:`shardopt.checkpoint.data_file`), and the table's CRC-32;
null where a rank wrote no file. ``crc32`` in the last line is of all bytes before the comma above it. A chunk's
elements are in row-major order, little-endian.

A tensor says in which files its elements are, in one of three ways (:mod:`shardopt.layout.partition`):

- ``start`` and ``cuts``: file ``start`` has the first part. Each cut ``[dim, ways, stride]`` cuts a dimension into
  ``ways`` parts; from one part to the next the file's number grows by ``stride``. No cuts: the file has all of it.
- ``start`` and ``range``, ``[ways, stride, first, size, dims]``: the tensor, flattened along its first ``dims``
  dimensions, begins at element ``first`` of a flat buffer, which is cut into ``ways`` ranges of ``size`` elements. A
  sixth entry ``[row_numel, block_size]`` means one number per block (scales; second moments of rows, with a matrix's
  row as a block), stored with the block's first element.
- ``parts``: a list of ``[file, offsets, shape]``, which cover each element once.

``header`` has ``extra`` (an object) and, with an optimizer, ``optimizer`` (the class's name) and ``param_groups``, a
list of ``{"parameters": [names], "options": {...}}``; ``aliases`` maps other names of shared parameters to those used.
Infinities and NaN in the header are objects (:mod:`shardopt.checkpoint.header`).
"""

from __future__ import annotations

import json
import math
import re
import sys
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from shardopt.checkpoint.errors import CheckpointError, InvalidError, demand
from shardopt.checkpoint.header import from_json, to_json
from shardopt.checkpoint.rectangles import common_part, fills, holders_of
from shardopt.checkpoint.storage import Folder, PathLike, folder_at
from shardopt.checkpoint.wording import named, shown
from shardopt.layout.partition import Cut, GridPartition, Part, Partition, RangePartition

INDEX_NAME = "checkpoint.json"
FORMAT = "shardopt"
FORMAT_VERSION = 2
MAX_DIMS = 64  # of a torch.Tensor

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and not name.startswith("q")  # quantized tensors consist of more than elements
}

_TOKEN = re.compile(r"[0-9a-f]{16}")
_DATA_FILE = re.compile(r"[0-9a-f]{16}-[0-9]{1,10}\.bin")
_UNFINISHED_INDEX = re.compile(re.escape(INDEX_NAME) + r"\.[0-9a-f]{16}")
_LAST_LINE = re.compile(rb',\n"crc32": "([0-9a-f]{8})"}\n\Z')


class StoredFile(NamedTuple):
    """Sizes of a data file: the bytes of its chunks and of the table behind the chunks, and the table's CRC-32."""

    data: int
    table: int
    crc32: int


class StoredTensor(NamedTuple):
    """An entry of the index: a tensor's global shape, and which data files have which of its elements.

    Attributes:
        dtype: the dtype.
        shape: the global shape.
        start: the number of the file with the first part of ``partition``.
        partition: the rule by which files from ``start`` on hold the tensor's parts; None if ``parts`` lists them.
        parts: without a partition, each rectangle of the tensor with the number of the file that has it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0
    partition: Partition | None = None
    parts: tuple[tuple[int, Part], ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def files_of(self, part: Part) -> list[int]:
        """The numbers of the files to read for the rectangle ``part`` of the tensor, ascending."""
        if 0 in part[1]:
            return []
        if self.partition is not None:
            return [self.start + offset for offset in holders_of(self.partition, self.shape, part)]
        return sorted({file for file, other in self.parts if common_part(part, other) is not None})


class Index(NamedTuple):
    """The content of ``checkpoint.json``.

    Attributes:
        header: the header as JSON values: ``extra``, ``param_groups`` and the like.
        token: 16 random hexadecimal digits with which the names of this save's data files begin.
        files: the sizes of each rank's data file, by the rank in the save; None for a rank that wrote no file.
        tensors: the tensors, sorted by name.
        crc32: the checksum in the last line; 0 if the index was not read from a file. Checkpoints saved into one folder
            differ in their checksums, because their tokens are random.
    """

    header: dict[str, Any]
    token: str
    files: list[StoredFile | None]
    tensors: dict[str, StoredTensor]
    crc32: int = 0

    @property
    def file_names(self) -> list[str]:
        """The names of all data files."""
        return [data_file_name(self.token, number) for number, file in enumerate(self.files) if file is not None]


def data_file_name(token: str, number: int) -> str:
    """The name of the data file that rank ``number`` writes in the save with this token."""
    return f"{token}-{number}.bin"


def read_header(path: PathLike) -> dict[str, Any]:
    """Reads the header of the checkpoint in a folder or at a URL, without its tensors: a dict with ``extra`` and more.

    Raises:
        CheckpointError: there is no checkpoint, or its index is damaged or of another format version.
    """
    return load_index(folder_at(path)).header


def load_index(folder: Folder) -> Index:
    """Reads and validates ``checkpoint.json``; CheckpointError if it is missing, damaged or of another version."""
    path = folder.path_of(INDEX_NAME)
    try:
        text = folder.read(INDEX_NAME)
    except OSError as error:
        raise CheckpointError(_why_unreadable(folder, error)) from None
    except MemoryError:
        raise CheckpointError(f"{path}: got an index that does not fit into memory; load another checkpoint") from None
    content, crc32 = _verified(path, text)
    version = content.get("format_version")
    if version != FORMAT_VERSION or type(version) is not int:
        raise CheckpointError(
            f"{path}: got format version {shown(version)}, expected {FORMAT_VERSION}; load it with the version of "
            "shardopt that saved it"
        )
    try:
        token: Any = content.get("token")
        demand(isinstance(token, str) and _TOKEN.fullmatch(token), f"token {shown(token)}")
        listed: Any = content.get("files")
        demand(isinstance(listed, list), "files that are no list")
        files = [
            None if fields is None else StoredFile(*_sizes(fields, f"file {number}", 3))
            for number, fields in enumerate(listed)
        ]
        entries = _mapping(content, "tensors")
        tensors = {name: tensor_from_json(name, entries[name], len(files)) for name in sorted(entries)}
        for name, tensor in tensors.items():
            if tensor.partition is None:
                is_filled = fills(tensor.shape, [part for _, part in tensor.parts])
                demand(is_filled, f"parts that do not fill {named(name)} {shown(tensor.shape)}")
        nbytes = sum(file.data for file in files if file is not None)
        is_enough = sum(tensor.nbytes for tensor in tensors.values()) <= nbytes  # so that no shape asks for more memory
        demand(is_enough, "tensors of more bytes than the data files have")
        return Index(_checked_header(content), token, files, tensors, crc32)
    except InvalidError as error:
        raise unknown_content(path, str(error)) from None


def dump_index(index: Index) -> bytes:
    """Encodes an index as the bytes of ``checkpoint.json``, with its checksum; TypeError as :func:`to_json`."""
    tensors = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(tensor_to_json(tensor))}" for name, tensor in index.tensors.items()
    )
    text = (
        f'{{"format": {json.dumps(FORMAT)}, "format_version": {FORMAT_VERSION},\n'
        f'"header": {to_json(index.header)},\n'
        f'"token": {json.dumps(index.token)},\n'
        f'"files": {json.dumps(index.files)},\n'
        f'"tensors": {{\n{tensors}}}'
    ).encode()
    return text + f',\n"crc32": "{zlib.crc32(text):08x}"}}\n'.encode()


def is_own_name(name: str) -> bool:
    """Whether a file is a data file or temporary index of a save, by its name: files that a save may remove."""
    return bool(_DATA_FILE.fullmatch(name) or _UNFINISHED_INDEX.fullmatch(name))


def tensor_to_json(tensor: StoredTensor) -> dict[str, Any]:
    """Encodes a tensor's entry in the index, as this module's docstring describes it."""
    entry: dict[str, Any] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": tensor.shape}
    partition = tensor.partition
    if partition is None:
        return {**entry, "parts": [[file, *part] for file, part in tensor.parts]}
    entry["start"] = tensor.start
    if isinstance(partition, GridPartition):
        return {**entry, "cuts": [[cut.dim, cut.ways, cut.stride] for cut in partition.cuts]}
    numbers = list(partition[:-1])
    return {**entry, "range": numbers if partition.block is None else [*numbers, list(partition.block)]}


def tensor_from_json(name: str, stored: Any, files: int) -> StoredTensor:
    """Decodes a tensor's entry in an index with ``files`` data files. Does not check that ``parts`` tile the tensor.

    Raises InvalidError if the entry is malformed, or names a data file that the index does not have.
    """
    forms = [{"dtype", "shape", *keys} for keys in (("start", "cuts"), ("start", "range"), ("parts",))]
    demand(isinstance(stored, dict) and stored.keys() in forms, f"tensor {named(name)}")
    dtype: Any = _DTYPES.get(stored["dtype"]) if isinstance(stored["dtype"], str) else None
    demand(dtype is not None, f"a dtype of {named(name)}")
    shape = _sizes(stored["shape"], name)
    demand(math.prod(max(extent, 1) for extent in shape) * dtype.itemsize < 2**63, f"a shape of {named(name)}")
    if "parts" not in stored:
        start = _size(stored["start"], name)
        files_from_start = sys.maxsize if 0 in shape else files - start  # no file has elements of an empty tensor
        try:
            partition = partition_from_json(stored, shape)
            _check_files(partition, files_from_start)
        except InvalidError as error:
            raise InvalidError(f"{error} of {named(name)} {shown(shape)}") from None
        return StoredTensor(dtype, shape, start, partition)
    demand(isinstance(stored["parts"], list), f"parts of {named(name)}")
    parts = []
    for part in stored["parts"]:
        demand(isinstance(part, list) and len(part) == 3, f"a part of {named(name)}")
        file = _size(part[0], name)
        demand(file < files, f"a part of {named(name)} in a file that is not listed")
        parts.append((file, (_sizes(part[1], name), _sizes(part[2], name))))
    return StoredTensor(dtype, shape, parts=tuple(parts))


def partition_from_json(stored: Mapping[str, Any], shape: tuple[int, ...]) -> Partition:
    """Decodes ``cuts`` or ``range`` in the entry of a tensor of this global shape; InvalidError if it is malformed."""
    if "cuts" in stored:
        demand(isinstance(stored["cuts"], list) and len(stored["cuts"]) <= MAX_DIMS, "cuts that are no list")
        cuts = [Cut(*_sizes(cut, "a cut", 3)) for cut in stored["cuts"]]
        for cut in cuts:
            demand(cut.dim < len(shape) and cut.ways > 0 and cut.stride > 0, "a cut of no dimension, or into no parts")
        return GridPartition(tuple(cuts))
    values: Any = stored.get("range")
    demand(isinstance(values, list) and len(values) in (5, 6), "a range that is no list of five or six values")
    ways, stride, first, size, dims = _sizes(values[:5], "a range", 5)
    demand(ways > 0 and stride > 0 and size > 0 and dims <= len(shape), "a range of no elements")
    block, numel = None, math.prod(shape[:dims])
    if len(values) == 6:
        row_numel, block_size = _sizes(values[5], "a block", 2)
        demand(row_numel > 0 and block_size > 0 and dims == 2, "scales of no blocks")
        demand(shape[1] == -(-row_numel // block_size), "scales of other blocks")
        block, numel = (row_numel, block_size), shape[0] * row_numel
    demand(first + numel < 2**63, "a range beyond all memory")
    return RangePartition(ways, stride, first, size, dims, block)


def unknown_content(path: str, what: str) -> CheckpointError:
    """Makes the error for a file whose checksum is right, but whose content is malformed."""
    return CheckpointError(f"{path}: got content that no version of shardopt writes: {what}; load another checkpoint")


def _verified(path: str, text: bytes) -> tuple[dict[str, Any], int]:
    """The JSON content of an index and its checksum; raises CheckpointError if the checksum does not match."""
    last_line = _LAST_LINE.search(text)
    if last_line is not None and zlib.crc32(text[: last_line.start()]) == int(last_line[1], 16):
        try:
            content = from_json(text)
        except (ValueError, RecursionError) as error:
            raise unknown_content(path, type(error).__name__) from None
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return content, int(last_line[1], 16)
    elif last_line is not None or FORMAT.encode() in text[:32]:
        raise CheckpointError(
            f"{path}: its content does not have the checksum in it, so it was damaged after it was saved; load another "
            "checkpoint"
        )
    raise CheckpointError(f"{path}: got a file of another kind, expected the index of a checkpoint of shardopt")


def _why_unreadable(folder: Folder, error: OSError) -> str:
    """The message of an error for a folder whose index cannot be read: what is in the folder instead."""
    path = folder.path_of(INDEX_NAME)
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{path}: cannot be read: {error}"
    if isinstance(error, NotADirectoryError):
        return f"{folder}: got a file, expected a folder; give what torch.load reads of it to load_state_dict"
    names = folder.names()
    if not names:
        return (
            f"{folder}: there is no such folder, or nothing in it, expected one with a checkpoint of shardopt; check "
            "the path, or read another program's file with torch.load or safetensors and give its state to import_state"
        )
    if any(map(_DATA_FILE.fullmatch, names)):
        return f"{folder}: got data without {INDEX_NAME}: saving it was never finished; load another checkpoint"
    if ".metadata" in names:
        return (
            f"{folder}: got a folder of torch.distributed.checkpoint, expected one of shardopt; load it with "
            "torch.distributed.checkpoint, and give another optimizer's state to import_state"
        )
    return (
        f"{folder}: there is no {INDEX_NAME} in it, expected the folder that shardopt.checkpoint.save was given; check "
        "the path (step-1000 in place of the folder around it)"
    )


def _mapping(parent: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the object ``key`` of another; raises an InvalidError if it is missing, or is no object."""
    value: Any = parent.get(key)
    demand(isinstance(value, dict), f"{key} that is no object")
    return value  # type: ignore[no-any-return]


def _size(value: Any, of: str) -> int:
    """Returns a number from the index, such as a size; raises an InvalidError if it is none from 0 to 2**63 - 1."""
    is_size = type(value) is int and 0 <= value < 2**63
    demand(is_size, f"a size of {named(of)} that is no whole number from 0 to 2**63 - 1")
    return value  # type: ignore[no-any-return]


def _sizes(value: Any, of: str, count: int | None = None) -> tuple[int, ...]:
    """Returns a list of sizes as a tuple, if it has `count` of them, or by default at most ``MAX_DIMS``."""
    is_list = isinstance(value, list) and (len(value) <= MAX_DIMS if count is None else len(value) == count)
    demand(is_list, f"sizes of {named(of)} that are no list of that length")
    return tuple(_size(each, of) for each in value)


def _check_files(partition: Partition, files: int) -> None:
    """Raises InvalidError unless each part has a file; ``files`` is the number of files from the first part's on."""
    last = sum((ways - 1) * stride for ways, stride in partition.strides)
    demand(last < max(files, 0), "parts in files that are not listed")
    demand(math.prod(ways for ways, _ in partition.strides) <= files, "more parts than files")


def _checked_header(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the header in an index's content; raises an InvalidError if a field has another form than described."""
    header = _mapping(content, "header")
    demand(isinstance(header.get("extra", {}), dict), "extra that is no object")
    aliases = _mapping({"aliases": {}, **header}, "aliases")
    demand(all(isinstance(name, str) for name in aliases.values()), "aliases that are wrong")
    groups = header.get("param_groups", [])
    demand(isinstance(groups, list), "param_groups that are no list")
    for group in groups:
        fields = group if isinstance(group, dict) else {}
        names, options = fields.get("parameters"), fields.get("options")
        are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
        demand(are_names and isinstance(options, dict), "a param group without names and options of its parameters")
    return header
