"""The portable checkpoint's format read and written by its description alone, and more strictly than it has to be."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

INDEX = "checkpoint.json"
DATA = re.compile(r"[0-9a-f]{16}-[0-9]+\.bin")
UNFINISHED = re.compile(re.escape(INDEX) + r"\..*[0-9a-f]{16}.*")

#: Bytes of an element of PyTorch's plain dtypes.
ITEMSIZES = {
    **dict.fromkeys(["bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"], 1),
    **dict.fromkeys(["bfloat16", "float16", "int16", "uint16"], 2),
    **dict.fromkeys(["float32", "int32", "uint32"], 4),
    **dict.fromkeys(["float64", "int64", "uint64", "complex64"], 8),
    "complex128": 16,
}
#: Names that PyTorch has for the same dtypes; no index has them, but they mean nothing else.
ALIASES = {"float": "float32", "half": "float16", "double": "float64", "int": "int32", "long": "int64"}

Json = dict[str, Any]


def read_index(folder: Path) -> Json:
    """The content of an index without its checksum."""
    content: Json = json.loads((folder / INDEX).read_text())
    del content["crc32"]
    return content


def with_checksum(text: bytes) -> bytes:
    """An index whose text, up to the checksum, is this."""
    return text + f',\n"crc32": "{zlib.crc32(text):08x}"}}\n'.encode()


def write_index(folder: Path, content: Json) -> None:
    (folder / INDEX).write_bytes(with_checksum(json.dumps(content)[:-1].encode()))


def strays(folder: Path) -> list[str]:
    """Files of earlier saves, in a folder where a save has just succeeded.

    Beside the checkpoint there may be one small file for a lock.
    """
    expected = {INDEX, *read_index(folder)["files"]}
    others = [path for path in folder.iterdir() if path.name not in expected]
    ours = [path.name for path in others if DATA.fullmatch(path.name) or UNFINISHED.fullmatch(path.name)]
    return sorted(ours or ([path.name for path in others] if len(others) > 1 else []))


def recut(folder: Path, files: int = 3) -> None:
    """Cuts a checkpoint's tensors into chunks of some rows, in several data files of equal lengths."""
    content = read_index(folder)
    (old,) = content["files"]
    data = (folder / old).read_bytes()
    names = [f"{old[:16]}-{number}.bin" for number in range(files)]
    parts = [bytearray() for _ in names]
    turn = 0
    for tensor in content["tensors"].values():
        chunks = []
        for chunk in tensor["chunks"]:
            for offsets, shape, piece in _rows(chunk, data[chunk["position"] :][: chunk["bytes"]]):
                part = parts[turn % files]
                part += bytes(-len(part) % 64)
                place = {"file": names[turn % files], "position": len(part), "bytes": len(piece)}
                chunks.append({"offsets": offsets, "shape": shape, **place, "crc32": zlib.crc32(piece)})
                part += piece
                turn += 1
        tensor["chunks"] = chunks
    length = max(map(len, parts))
    (folder / old).unlink()
    for name, part in zip(names, parts, strict=True):
        (folder / name).write_bytes(part + bytes(length - len(part)))
    content["files"] = dict.fromkeys(names, length)
    write_index(folder, content)


def _rows(chunk: Json, data: bytes) -> list[tuple[list[int], list[int], bytes]]:
    """Offsets, shape and bytes of each third of a chunk."""
    offsets, shape = chunk["offsets"], chunk["shape"]
    rows = shape[0] if shape else 1
    if rows < 3:
        return [(offsets, shape, data)]
    size = len(data) // rows
    edges = [0, rows // 3, 2 * rows // 3, rows]
    return [
        ([offsets[0] + a, *offsets[1:]], [b - a, *shape[1:]], data[a * size : b * size]) for a, b in pairwise(edges)
    ]


def strict_tensors(folder: Path, content: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]] | str:
    """Each tensor's dtype, shape and bytes, if all is as the format demands, otherwise what is not."""
    try:
        _demand(content["format"] == "shardopt", "format")
        _demand(_whole(content["format_version"]) and content["format_version"] == 1, "format_version")
        _demand(isinstance(content["header"], dict), "header")
        _demand(isinstance(content["files"], dict) and isinstance(content["tensors"], dict), "files or tensors")
        return {name: _tensor(folder, content["files"], tensor) for name, tensor in content["tensors"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _tensor(folder: Path, files: Json, tensor: Json) -> tuple[str, tuple[int, ...], bytes]:
    dtype, shape = ALIASES.get(tensor["dtype"], tensor["dtype"]), tensor["shape"]
    size = ITEMSIZES[dtype]
    _demand(_extents(shape), "shape")
    whole = bytearray(math.prod(shape) * size) if math.prod(shape) < 1 << 24 else None
    _demand(whole is not None, "more than the data files hold")
    seen = bytearray(math.prod(shape))
    _demand(isinstance(tensor["chunks"], list), "chunks")
    for chunk in tensor["chunks"]:
        data = _data(folder, files, chunk)
        offsets, extents = chunk["offsets"], chunk["shape"]
        _demand(_extents(offsets) and _extents(extents) and len(offsets) == len(extents) == len(shape), "rectangle")
        _demand(all(a + b <= c for a, b, c in zip(offsets, extents, shape, strict=True)), "rectangle outside")
        _demand(len(data) == math.prod(extents) * size, "bytes")
        _fill(offsets, extents, shape, lambda at, of, length, data=data: _put(whole, seen, data, at, of, length, size))
    _demand(all(seen), "elements left out")
    return dtype, tuple(shape), bytes(whole or b"")


def _data(folder: Path, files: Json, chunk: Json) -> bytes:
    name, position, length = chunk["file"], chunk["position"], chunk["bytes"]
    _demand(isinstance(name, str) and DATA.fullmatch(name) is not None, "file")
    data = (folder / name).read_bytes() if (folder / name).is_file() else b""
    _demand(_whole(files[name]) and len(data) == files[name], "length of a file")
    _demand(_whole(position) and _whole(length) and position + length <= len(data), "position")
    found = data[position : position + length]
    _demand(length == 0 or (_whole(chunk["crc32"]) and zlib.crc32(found) == chunk["crc32"]), "crc32")
    return found


def _fill(offsets: list[int], extents: list[int], shape: list[int], put: Callable[[int, int, int], None]) -> None:
    """Calls ``put`` with each run of elements: its first in the tensor, its first in the chunk, its length."""
    if 0 in extents:
        return
    run = extents[-1] if extents else 1
    for number in range(math.prod(extents[:-1])):
        rest, at, stride = number, offsets[-1] if offsets else 0, shape[-1] if shape else 1
        for offset, extent, full in zip(offsets[-2::-1], extents[-2::-1], shape[-2::-1], strict=True):
            rest, place = divmod(rest, extent)
            at, stride = at + (offset + place) * stride, stride * full
        put(at, number * run, run)


def _put(whole: bytearray | None, seen: bytearray, data: bytes, at: int, of: int, length: int, size: int) -> None:
    assert whole is not None
    _demand(not any(seen[at : at + length]), "elements twice")
    seen[at : at + length] = b"\1" * length
    whole[at * size : (at + length) * size] = data[of * size : (of + length) * size]


def _demand(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _extents(value: Any) -> bool:
    return isinstance(value, list) and all(map(_whole, value))
