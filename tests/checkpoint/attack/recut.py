"""Cuts a checkpoint of one file into several, by each of the ways in which an index can say where elements are."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from attack.index_file import ITEMSIZES, Chunk, Saved, file_name, read_index, strict_tensors
from attack.rules import Files, Json, box, files_of_elements

#: Files of the rules below.
FILES = 4
_ALIGNMENT = 64


def recut(folder: Path, files: int = FILES, rule: Callable[[Json, str, int], Json] | None = None) -> None:
    """Cuts tensors into chunks in so many data files of equal lengths; the index has null for one more.

    ``rule`` gives a tensor's, by the index's content, its name and number; by default each way by turns, in several
    forms.
    """
    content = read_index(folder)
    tensors = strict_tensors(folder, content)
    assert not isinstance(tensors, str), tensors
    (folder / file_name(content, 0)).unlink()
    data = [bytearray() for _ in range(files)]
    tables: list[list[Chunk]] = [[] for _ in range(files)]
    for number, name in enumerate(sorted(tensors)):
        dtype, shape, values = tensors[name]
        line = {"dtype": dtype, "shape": list(shape), **(rule or _rule)(content, name, number)}
        content["tensors"][name] = line
        elements = np.frombuffer(values, dtype=np.uint8).reshape([*shape, ITEMSIZES[dtype]])
        for file, offsets, extents in [] if 0 in shape else rectangles(files_of_elements(line)):
            own = data[file]
            own += bytes(-len(own) % _ALIGNMENT)
            piece = elements[(*box(offsets, extents), slice(None))].tobytes()
            tables[file].append(Chunk(number, len(own), zlib.crc32(piece), tuple(offsets), tuple(extents)))
            own += piece
    content["files"] = [[0, 0, 0]] * files + [None]
    dims = max(len(chunk.shape) for table in tables for chunk in table)
    lengths = [16 + len(table) * (16 + 16 * dims) for table in tables]
    total = max(len(own) + length for own, length in zip(data, lengths, strict=True))
    padded = [bytes(own + bytes(total - length - len(own))) for own, length in zip(data, lengths, strict=True)]
    Saved(content, [*padded, b""], [*tables, []]).write(folder)
    assert strict_tensors(folder, read_index(folder)) == tensors


def rectangles(files: Files) -> Iterator[tuple[int, list[int], list[int]]]:
    """File, offsets and shape of rectangles that each have elements of one file, of a third of the rows at most."""
    behind: list[int] = []
    while files.ndim > 2 and (files == files[..., :1]).all():
        behind.insert(0, files.shape[-1])
        files = files[..., 0]
    shape = files.shape
    if not shape:
        yield int(files), [], []
        return
    rows, cols = (1, *shape)[-2:]
    for outer in np.ndindex(*shape[:-2]):
        plane = files[outer].reshape(rows, cols)
        begun: dict[tuple[int, int, int], int] = {}
        for row in range(rows + 1):
            runs = _runs(plane[row].tolist()) if row < rows else []
            for run, first in list(begun.items()):
                if run not in runs or row - first == max(rows // 3, 1):
                    file, begin, end = run
                    low, extents = ([first], [row - first]) if len(shape) > 1 else ([], [])
                    offsets = [*outer, *low, begin, *[0] * len(behind)]
                    yield file, offsets, [*[1] * len(outer), *extents, end - begin, *behind]
                    del begun[run]
            for run in runs:
                begun.setdefault(run, row)


def _runs(files: list[int]) -> list[tuple[int, int, int]]:
    """File, begin and end of each run of elements of one file."""
    edges = [0, *(i for i in range(1, len(files)) if files[i] != files[i - 1]), len(files)]
    return [(files[a], a, b) for a, b in pairwise(edges)]


def _rule(content: Json, name: str, number: int) -> Json:
    """A rule for a tensor: the three ways by turns, each in several forms."""
    shape = content["tensors"][name]["shape"]
    way, turn = number % 3, number // 3
    if way == 0 or not shape:
        forms: list[list[list[int]]] = [[[0, 3, 1]], [[0, 2, 2], [len(shape) - 1, 2, 1]], [[0, 2, 1], [0, 2, 2]]]
        return {"start": turn % 2 if turn % 3 == 0 else 0, "cuts": forms[turn % 3]} if shape else _scalar(number)
    if way == 1:
        return {"start": turn % 2, "range": _range(content, name, ways=4 - turn % 2)}
    return {"parts": _parts(shape, turn)}


def _scalar(number: int) -> Json:
    file = number % FILES
    return [{"start": file, "cuts": []}, {"start": 1, "range": [2, 2, 3, 40, 0]}, {"parts": [[file, [], []]]}][
        number % 3
    ]


def _range(content: Json, name: str, ways: int) -> list[Any]:
    """A range of the flattened tensor, which begins somewhere in what is cut; scales are where their blocks begin."""
    shape, first = content["tensors"][name]["shape"], 37
    codes = content["tensors"].get(name.removesuffix("_scales") + "_codes")
    if codes is None:
        return [ways, 1, first, math.ceil((math.prod(shape) + first) / ways) or 1, len(shape)]
    row_numel, block_size = math.prod(codes["shape"][1:]), content["header"]["param_groups"][0]["options"]["block_size"]
    size = math.ceil((shape[0] * row_numel + first) / ways)
    return [ways, 1, first, size, 2, [row_numel, block_size]]


def _parts(shape: list[int], turn: int) -> list[Any]:
    """Thirds of the rows, of which the first is cut again."""
    if 0 in shape:
        return []
    edges = sorted({0, shape[0] // 3, 2 * shape[0] // 3, shape[0]})
    parts: list[Any] = []
    for low, high in pairwise(edges):
        half = shape[1] // 2 if len(shape) > 1 and not low else 0
        for begin, end in ((0, half), (half, shape[1])) if half else ((0, 0),):
            file = (turn + len(parts)) % FILES
            if half:
                parts.append([file, [low, begin, *[0] * len(shape[2:])], [high - low, end - begin, *shape[2:]]])
            else:
                parts.append([file, [low, *[0] * len(shape[1:])], [high - low, *shape[1:]]])
    return parts
