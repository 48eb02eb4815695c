"""Mutations of the tables in data files, whose checksums in the index are right nonetheless."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from random import Random

from attack.forked import shown
from attack.index_file import Chunk, fit_tables, table_of
from attack.json_values import COLUMNS
from attack.rules import Json


class State:
    """A checkpoint that is being changed.

    Args:
        content: the index, which is changed in place.
        data: the bytes of chunks in each data file.
        tables: the rows of each data file.
    """

    def __init__(self, content: Json, data: list[bytes], tables: list[list[Chunk]]) -> None:
        self.content, self.data, self.tables = content, data, tables
        #: Bytes that take the place of the rows, by the number of the file.
        self.raw: dict[int, bytes] = {}
        self.touched: set[int] = set()
        #: Bytes that are far behind the others, with a hole between them, and where, by the number of the file.
        self.far: dict[int, tuple[int, bytes]] = {}
        self._remember(content["tensors"])

    def fit_names(self) -> str:
        """Lets tables have the numbers that tensors have by now. A tensor that was renamed keeps its chunks."""
        tensors = self.content.get("tensors")
        if not isinstance(tensors, dict) or sorted(tensors) == self._names or self.raw:
            return ""
        new = {id(line): name for name, line in tensors.items()}
        names = {name: new[id(line)] for name, line in self._lines.items() if id(line) in new}
        fit_tables(self.tables, self._names, names, sorted(tensors))
        self._remember(tensors)
        self.touched |= {number for number, data in enumerate(self.data) if data}
        return ", with tables that fit"

    def files(self) -> dict[int, dict[int, bytes]]:
        """The bytes of the data files that changed, by their positions; the index then describes their tables."""
        found = {}
        for number in sorted(self.touched | self.raw.keys()):
            table = self.raw[number] if number in self.raw else table_of(self.tables[number])
            position, data = self.far.get(number, (0, b""))
            end = max(len(self.data[number]), position + len(data))
            found[number] = {0: self.data[number], position or end: data, end: table}
            files = self.content.get("files")
            if isinstance(files, list) and number < len(files) and isinstance(files[number], list):
                files[number][:] = [end, len(table), zlib.crc32(table)]
        return found

    def _remember(self, tensors: Json) -> None:
        self._lines, self._names = dict(tensors), sorted(tensors)

    def names_of(self, file: int) -> list[int]:
        """The tensors with chunks in a file."""
        return sorted({chunk.tensor for chunk in self.tables[file]})


def _number(rng: Random, state: State) -> str:
    """A number in a row, far from what it was or near."""
    file, row, chunk = _row(rng, state)
    field = rng.choice(["tensor", "position", "crc32", "offsets", "shape", "offsets", "shape"])
    old = getattr(chunk, field)
    if field in ("offsets", "shape"):
        if not old:
            return "no dimensions"
        dim = rng.randrange(len(old))
        new = rng.choice([*COLUMNS, *(old[dim] + more for more in (-64, -2, -1, 1, 2, 64))])
        changed: object = (*old[:dim], new, *old[dim + 1 :])
    else:
        changed = new = rng.choice([*COLUMNS, *(old + more for more in (-64, -2, -1, 1, 2, 64))])
    state.tables[file][row] = chunk._replace(**{field: changed})
    return f"{field} = {new} in row {row} of file {file}, {shown(chunk)}"


def _rows(rng: Random, state: State) -> str:
    """Rows that do not fill their tensor, or twice, or elsewhere; few of these are harmless."""
    file = rng.randrange(4)
    rows = state.tables[file]
    tensor = rng.choice(state.names_of(file))
    alike = [i for i, chunk in enumerate(rows) if chunk.tensor == tensor]
    one, other = rng.sample(alike if len(alike) > 1 and rng.random() < 0.7 else range(len(rows)), 2)
    fields = rng.choice([["offsets"], ["shape"], ["offsets", "shape"], ["position"], ["position", "crc32"], ["tensor"]])
    how = rng.choice(["swap", "copy", "drop", "double", "order", "transpose", "offset", "wide", "move", "merge"])
    a, b = rows[one], rows[other]
    if how == "swap":
        rows[one] = a._replace(**{field: getattr(b, field) for field in fields})
        rows[other] = b._replace(**{field: getattr(a, field) for field in fields})
    elif how == "copy":
        rows[one] = a._replace(**{field: getattr(b, field) for field in fields})
    elif how == "drop":
        del rows[one]
    elif how == "double":
        rows.insert(other, a)
    elif how == "order":  # harmless
        rng.shuffle(rows)
    elif how == "transpose":
        rows[one] = a._replace(shape=a.shape[::-1])
    elif how == "offset":
        rows[one] = a._replace(offsets=tuple(offset + rng.randint(-3, 3) for offset in a.offsets))
    elif how == "wide":
        rows[one] = a._replace(shape=(a.shape[0] + 1, *a.shape[1:]))
        rows[other] = b._replace(shape=(b.shape[0] - 1, *b.shape[1:]))
    elif how == "move":  # into another file, with the bytes
        to = (file + rng.randrange(1, 4)) % 4
        begin = len(state.data[to])
        state.data[to] += state.data[file][a.position : a.position + 2**16]
        state.tables[to].append(a._replace(position=begin))
        state.touched.add(to)
        del rows[one]
    else:  # bytes of several chunks as one
        rows[one] = a._replace(shape=(a.shape[0] + b.shape[0], *a.shape[1:]))
        del rows[other]
    state.touched.add(file)
    return f"{how} {fields if how in ('swap', 'copy') else ''} rows {one}, {other} of file {file}, {shown(a)}"


def _behind(rng: Random, state: State) -> str:
    """Corners behind the tensor's dimensions that are other than 0 and 1, or more dimensions than necessary."""
    file, row, chunk = _row(rng, state)
    dims = max(len(each.shape) for each in state.tables[file]) + rng.choice([0, 1, 1, 60, 61])
    pair = rng.choice([(0, 1), (0, 0), (1, 0), (1, 1), (0, 2), (-1, 1), (-1, 2), (0, 2**62), (2**63 - 1, 1), (0, -1)])
    known = len(state.content["tensors"][sorted(state.content["tensors"])[chunk.tensor]]["shape"])
    more = max(dims - known, 0)
    offsets = (*chunk.offsets[:known], *[0] * max(more - 1, 0), *[pair[0]] * min(more, 1))
    extents = (*chunk.shape[:known], *[1] * max(more - 1, 0), *[pair[1]] * min(more, 1))
    state.tables[file][row] = chunk._replace(offsets=offsets, shape=extents)
    if dims <= 65:
        state.raw[file] = table_of(state.tables[file], dims)
    return f"{pair} behind {known} of {dims} in row {row} of file {file}"


def _empty_rows(rng: Random, state: State) -> str:
    """Chunks without elements, a few or far too many, or in place of those with elements."""
    file, row, chunk = _row(rng, state)
    count = rng.choice([1, 1, 5000, 50_000])
    empty = chunk._replace(shape=tuple(0 for _ in chunk.shape), position=rng.choice([0, chunk.position]), crc32=0)
    if rng.random() < 0.3:
        state.tables[file][row] = empty
        return f"row {row} of file {file}"
    state.tables[file] += [empty] * count
    state.touched.add(file)
    return f"{count} like row {row} of file {file}"


def _head(rng: Random, state: State) -> str:
    """The number of rows or dimensions."""
    file = rng.randrange(4)
    table = table_of(state.tables[file])
    count, dims = struct.unpack_from("<2Q", table)
    numbers = [*COLUMNS, count, dims, count + 1, dims + 1, count - 1, dims - 1, 2**64 - 1, 2**60, 2**59]
    new = [rng.choice(numbers), dims] if rng.random() < 0.5 else [count, rng.choice(numbers)]
    if rng.random() < 0.2:  # 2**64 bytes, which 64 bits take for none
        new = [2**60, 2**4]
    state.raw[file] = struct.pack("<2Q", *(number % 2**64 for number in new)) + table[16:]
    return f"{new} for {count, dims} of file {file}"


def _bytes(rng: Random, state: State) -> str:
    """The table's bytes."""
    file = rng.randrange(4)
    table = bytearray(table_of(state.tables[file]))
    how = rng.choice(["empty", "cut", "longer", "flip", "random", "ones", "zeros", "another's", "data", "head only"])
    place = rng.randrange(len(table))
    other = (file + 1) % 4
    changed = {
        "empty": b"",
        "cut": bytes(table[:place]),
        "longer": bytes(table) + rng.choice([b"\0", b"\0" * 16, bytes(table)]),
        "flip": bytes(table[:place]) + bytes([table[place] ^ (1 << rng.randrange(8))]) + bytes(table[place + 1 :]),
        "random": bytes(table[:16]) + rng.randbytes(len(table) - 16),
        "ones": bytes(table[:16]) + b"\xff" * (len(table) - 16),
        "zeros": bytes(table[:16]) + bytes(len(table) - 16),
        "another's": table_of(state.tables[other]),
        "data": state.data[file][: rng.choice([15, 16, 1000])],
        "head only": bytes(16),
    }
    state.raw[file] = changed[how]
    return f"{how} at {place} of file {file}"


def _many_rows(rng: Random, state: State) -> str:
    """An extra tensor in very many chunks, rightly described or not."""
    count = rng.choice([2000, 5000])
    how = rng.choice(["apart", "apart", "overlapping", "in two files"])
    state.content["tensors"]["extra.many"] = {"dtype": "uint8", "shape": [count], "start": 0, "cuts": []}
    if how == "in two files":
        state.content["tensors"]["extra.many"]["cuts"] = [[0, 2, 1]]
    state.fit_names()
    number = sorted(state.content["tensors"]).index("extra.many")
    for index in range(count):
        file = int(how == "in two files" and index >= (count + 1) // 2)
        offset = 0 if how == "overlapping" else index
        position = len(state.data[file]) + index
        state.tables[file].append(Chunk(number, position, zlib.crc32(b"\0"), (offset,), (1,)))
    for file in range(2):
        state.data[file] += bytes(count)
    state.touched |= {0, 1}
    return f"{how} {count}"


def _far(rng: Random, state: State) -> str:
    """A chunk far behind the others in its file, at a position that 32 bits do not hold, or beyond the file."""
    file, row, chunk = _row(rng, state)
    position = rng.choice([2**31, 2**32, 2**33, 2**36]) + rng.choice([0, 1, 64])
    state.far[file] = position, state.data[file][chunk.position : chunk.position + 2**16]
    more = rng.choice([0, 0, 0, 1, -1, -position, 2**32, 2**16])
    state.tables[file][row] = chunk._replace(position=position + more)
    return f"row {row} of file {file} at {position} + {more}"


def _row(rng: Random, state: State) -> tuple[int, int, Chunk]:
    """A file, and a row of its table that is about to be changed."""
    file = rng.randrange(4)
    state.touched.add(file)
    row = rng.randrange(len(state.tables[file]))
    return file, row, state.tables[file][row]


OF_TABLES: list[Callable[[Random, State], str]] = [
    *([_number, _rows] * 3),
    *(_behind, _behind, _empty_rows, _head, _bytes, _many_rows, _far),
]
