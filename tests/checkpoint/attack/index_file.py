"""The portable checkpoint's format read and written by its description alone, and more strictly than it has to be."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attack.rules import MOST_ELEMENTS, Json, box, check_rule, demand, files_of_elements, sizes, whole

INDEX = "checkpoint.json"
DATA = re.compile(r"[0-9a-f]{16}-[0-9]+\.bin")
UNFINISHED = re.compile(re.escape(INDEX) + r"\..*[0-9a-f]{16}.*")

#: Bytes of an element of PyTorch's plain dtypes, and of those that mutations give to tensors nobody loads.
ITEMSIZES = {
    **dict.fromkeys(["bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "bits8", "uint7"], 1),
    **dict.fromkeys(["bfloat16", "float16", "int16", "uint16"], 2),
    **dict.fromkeys(["float32", "int32", "uint32"], 4),
    **dict.fromkeys(["float64", "int64", "uint64", "complex64"], 8),
    "complex128": 16,
}


class Chunk(NamedTuple):
    """A row of a table, with as many offsets and extents as the table has dimensions, or as the tensor has."""

    tensor: int
    position: int
    crc32: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def read_index(folder: Path) -> Json:
    """The content of an index without its checksum."""
    content: Json = json.loads((folder / INDEX).read_text())
    del content["crc32"]
    return content


def value_of(value: Any) -> Any:
    """A value of a header, whose objects stand for numbers that JSON does not have, by the format's description."""
    if isinstance(value, list):
        return [value_of(each) for each in value]
    if not isinstance(value, dict):
        return value
    if list(value) == ["$numberDouble"] and value["$numberDouble"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["$numberDouble"])
    escaped = len(value) == 1 and re.fullmatch(r"\$\$+numberDouble", next(iter(value)))
    return {key[1:] if escaped else key: value_of(each) for key, each in value.items()}


def with_checksum(text: bytes) -> bytes:
    """An index whose text, up to the checksum, is this."""
    return text + f',\n"crc32": "{zlib.crc32(text):08x}"}}\n'.encode()


def write_index(folder: Path, content: Json) -> None:
    (folder / INDEX).write_bytes(with_checksum(json.dumps(content)[:-1].encode()))


def file_name(content: Json, number: int) -> str:
    return f"{content['token']}-{number}.bin"


def chunks_of(table: bytes) -> list[Chunk]:
    """The rows of a table; ValueError if its length is wrong."""
    demand(len(table) >= 16, "a table without a head")
    count, dims = struct.unpack_from("<2Q", table)
    demand(dims <= 64 and len(table) == 16 + count * (16 + 16 * dims), "length of a table")
    position = struct.unpack_from(f"<{count}q", table, 16)
    tensor = struct.unpack_from(f"<{count}I", table, 16 + 8 * count)
    crc32 = struct.unpack_from(f"<{count}I", table, 16 + 12 * count)
    corners = struct.unpack_from(f"<{2 * count * dims}q", table, 16 + 16 * count)
    found = []
    for row in range(count):
        begin = 2 * dims * row
        both = corners[begin : begin + dims], corners[begin + dims : begin + 2 * dims]
        found.append(Chunk(tensor[row], position[row], crc32[row], *both))
    return found


def table_of(chunks: Sequence[Chunk]) -> bytes:
    """A table of these rows. Numbers that its columns cannot hold are cut to the columns' bits."""
    dims = max((len(chunk.shape) for chunk in chunks), default=0)
    corners: list[int] = []
    for chunk in chunks:
        corners += [*chunk.offsets, *[0] * (dims - len(chunk.offsets))]
        corners += [*chunk.shape, *[1] * (dims - len(chunk.shape))]
    return b"".join(
        [
            struct.pack("<2Q", len(chunks), dims),
            _column([chunk.position for chunk in chunks], 8),
            _column([chunk.tensor for chunk in chunks], 4),
            _column([chunk.crc32 for chunk in chunks], 4),
            _column(corners, 8),
        ]
    )


def _column(values: Sequence[int], size: int) -> bytes:
    return b"".join((value % 2 ** (8 * size)).to_bytes(size, "little") for value in values)


class Saved(NamedTuple):
    """A checkpoint in memory: the index, and the bytes and chunks of each data file; none where the index has null."""

    content: Json
    data: list[bytes]
    tables: list[list[Chunk]]

    def write(self, folder: Path) -> None:
        """Writes all of it into a folder, with the lengths and checksums of the tables."""
        for number, stored in enumerate(self.content["files"]):
            if stored is not None:
                table = table_of(self.tables[number])
                (folder / file_name(self.content, number)).write_bytes(self.data[number] + table)
                self.content["files"][number] = [len(self.data[number]), len(table), zlib.crc32(table)]
        write_index(folder, self.content)


def read_saved(folder: Path) -> Saved:
    """A checkpoint as it is."""
    content = read_index(folder)
    data, tables = [], []
    for number, stored in enumerate(content["files"]):
        both = b"" if stored is None else (folder / file_name(content, number)).read_bytes()
        data.append(both[: stored[0]] if stored else b"")
        tables.append(chunks_of(both[stored[0] :]) if stored else [])
    return Saved(content, data, tables)


def fit_tables(tables: list[list[Chunk]], old: list[str], names: dict[str, str], new: list[str]) -> None:
    """Gives the rows of tables the numbers of tensors in ``new`` in place of ``old`` (sorted), and removes others."""
    numbers = {old.index(was): new.index(name) for was, name in names.items()}
    for table in tables:
        table[:] = [chunk._replace(tensor=numbers[chunk.tensor]) for chunk in table if chunk.tensor in numbers]


def strays(folder: Path) -> list[str]:
    """Files of earlier saves, in a folder where a save has just succeeded.

    Beside the checkpoint there may be one small file for a lock.
    """
    content = read_index(folder)
    expected = {INDEX, *(file_name(content, i) for i, stored in enumerate(content["files"]) if stored is not None)}
    others = [path for path in folder.iterdir() if path.name not in expected]
    ours = [path.name for path in others if DATA.fullmatch(path.name) or UNFINISHED.fullmatch(path.name)]
    return sorted(ours or ([path.name for path in others] if len(others) > 1 else []))


Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def strict_tensors(folder: Path, content: Any, reads: Callable[[str], bool] | None = None) -> Tensors | str:
    """Each tensor's dtype, shape and bytes, if all is as the format demands, otherwise what is not.

    ``reads`` are the tensors that a load looks at. Of other tensors only their lines in the index are checked, and
    chunks are not looked for outside the files that have a part of their tensor. None: all files are checked, and no
    chunk may be in a file where its tensor's rule does not have it.
    """
    try:
        demand(content["format"] == "shardopt", "format")
        demand(whole(content["format_version"]) and content["format_version"] == 2, "format_version")
        demand(isinstance(content["header"], dict), "header")
        demand(re.fullmatch("[0-9a-f]{16}", content["token"]) is not None, "token")
        demand(isinstance(content["files"], list) and isinstance(content["tensors"], dict), "files or tensors")
        for stored in content["files"]:
            demand(stored is None or (sizes(stored) and len(stored) == 3), "a file")
        for tensor in content["tensors"].values():
            check_rule(tensor, len(content["files"]))
            demand(math.prod(max(extent, 1) for extent in tensor["shape"]) < 2**63, "a shape")
        reader = _Reader(folder, content)
        found = {
            name: reader.tensor(name, reads is None) for name in content["tensors"] if reads is None or reads(name)
        }
        if reads is None:
            reader.check_all()
        return found
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"


class _Reader:
    def __init__(self, folder: Path, content: Json) -> None:
        self._folder, self._content = folder, content
        self._names = sorted(content["tensors"])
        self._tables: dict[int, list[Chunk]] = {}
        self._used: set[tuple[int, int]] = set()

    def tensor(self, name: str, only_there: bool) -> tuple[str, tuple[int, ...], bytes]:
        """A tensor.

        Args:
            name: its name.
            only_there: whether each chunk must be in the file where the rule has its elements.
        """
        tensor, number = self._content["tensors"][name], self._names.index(name)
        shape, size = tensor["shape"], ITEMSIZES[tensor["dtype"]]
        if 0 in shape:
            return tensor["dtype"], tuple(shape), b""
        demand(math.prod(shape) <= MOST_ELEMENTS, "more than the data files hold")
        files = files_of_elements(tensor)
        values, seen = np.zeros([*shape, size], dtype=np.uint8), np.zeros(shape, dtype=np.bool_)
        for file in sorted({int(number) for number in np.unique(files)}):
            for row, chunk in enumerate(self._table(file)):
                if chunk.tensor != number:
                    continue
                extents = chunk.shape[: len(shape)]
                inside = box(chunk.offsets[: len(shape)], extents)
                demand(not only_there or bool((files[inside] == file).all()), "a chunk in another tensor's file")
                demand(not seen[inside].any(), "elements twice")
                seen[inside] = True
                data = self._read(file, chunk.position, math.prod(extents) * size)
                demand(zlib.crc32(data) == chunk.crc32, "crc32")
                values[(*inside, slice(None))] = np.frombuffer(data, dtype=np.uint8).reshape([*extents, size])
                self._used.add((file, row))
        demand(bool(seen.all()), "elements left out")
        return tensor["dtype"], tuple(shape), values.tobytes()

    def check_all(self) -> None:
        """Checks that all chunks were used, after all tensors were read."""
        for file, stored in enumerate(self._content["files"]):
            if stored is not None:
                rows = {(file, row) for row in range(len(self._table(file)))}
                demand(rows <= self._used, "a chunk in a file that has no part of its tensor")

    def _table(self, file: int) -> list[Chunk]:
        if file not in self._tables:
            stored = self._content["files"][file]
            demand(stored is not None, "a file that is null")
            demand(self._path(file).is_file() and self._path(file).stat().st_size == stored[0] + stored[1], "a length")
            data = self._read(file, stored[0], stored[1])
            demand(zlib.crc32(data) == stored[2], "crc32 of a table")
            self._tables[file] = chunks_of(data)
            self._check_rows(self._tables[file], stored[0])
        return self._tables[file]

    def _check_rows(self, chunks: list[Chunk], length: int) -> None:
        ranges = []
        for chunk in chunks:
            demand(chunk.tensor < len(self._names), "number of a tensor")
            tensor = self._content["tensors"][self._names[chunk.tensor]]
            dims = len(tensor["shape"])
            demand(dims <= len(chunk.shape), "dimensions")
            demand(set(chunk.offsets[dims:]) <= {0} and set(chunk.shape[dims:]) <= {1}, "corners behind")
            for low, extent, most in zip(chunk.offsets, chunk.shape, tensor["shape"], strict=False):
                demand(low >= 0 and extent >= 1 and low + extent <= most, "a chunk beyond its tensor")
            end = chunk.position + math.prod(chunk.shape) * ITEMSIZES[tensor["dtype"]]
            demand(chunk.position >= 0 and end <= length, "a chunk beyond its file")
            demand(end - chunk.position <= 1 << 23, "a chunk of more than 8 MiB")
            ranges.append((chunk.position, end))
        demand(all(one[1] <= other[0] for one, other in pairwise(sorted(ranges))), "chunks share bytes")

    def _read(self, file: int, position: int, length: int) -> bytes:
        with self._path(file).open("rb") as opened:
            data = os.pread(opened.fileno(), length, position)
        demand(len(data) == length, "bytes are missing")
        return data

    def _path(self, file: int) -> Path:
        return self._folder / file_name(self._content, file)
