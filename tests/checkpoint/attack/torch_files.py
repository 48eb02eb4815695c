"""Mutations of files of torch.save: archives, pickles opcode by opcode, and objects that no state dict has."""

from __future__ import annotations

import io
import pickletools
import reprlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from attack.json_values import VALUES, Raw

_BIG = [0, 1, 2**16 - 1, 2**31, 2**32 - 1]
_CENTRAL, _END = b"PK\1\2", b"PK\5\6"


@dataclass
class Archive:
    """The records of an archive, by name without the folder."""

    folder: str
    records: dict[str, bytes]

    @classmethod
    def read(cls, data: bytes) -> Archive:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            folder = names[0].split("/")[0]
            return cls(folder, {name.removeprefix(f"{folder}/"): archive.read(name) for name in names})

    def written(self, compressed: tuple[str, ...] = (), more: tuple[tuple[str, bytes], ...] = ()) -> bytes:
        """The archive's bytes, some records compressed, and more records at its end."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in [*self.records.items(), *more]:
                how = zipfile.ZIP_DEFLATED if name in compressed else zipfile.ZIP_STORED
                archive.writestr(f"{self.folder}/{name}", data, how)
        return file.getvalue()


def mutated_archive(rng: Random, archive: Archive) -> tuple[bytes, bool, str]:
    """The bytes of another archive, whether it has the same values, and what was done."""
    how = rng.choice(["bomb", "compress", "twice", "remove", "central", "central", "end", "prefix", "suffix", "overlap",
                      "name", "zip64", "order", "byteorder"])  # fmt: skip
    name = rng.choice(sorted(archive.records))
    if how == "bomb":
        pattern = rng.choice([b"\x80\x02]N0", b"\x80\x02(" + b"N" * 100, b"N", b"(", b"\x80\x02X\xff\xff\xff\x7f"])
        archive.records["data.pkl"] = pattern + pattern[-1:] * (100 << 20)
        return archive.written(compressed=("data.pkl",)), False, f"{how} of {pattern[:8]!r}"
    if how == "compress":
        return archive.written(compressed=(name,)), False, f"{how} {name}"
    if how == "twice":
        return archive.written(more=((name, archive.records[rng.choice(sorted(archive.records))]),)), False, how
    if how == "remove":
        del archive.records[name]
        return archive.written(), False, f"{how} {name}"
    if how == "name":
        archive.records[rng.choice(["../x", "data/\0", "", "data.pkl/data.pkl", "\ud7ff" * 20000])] = b"x"
        return archive.written(), False, how
    if how == "order":
        items = sorted(archive.records.items(), key=lambda item: rng.random())
        return Archive("other", dict(items)).written(), True, how
    if how == "byteorder":
        archive.records["byteorder"] = rng.choice([b"big", b"", b"l" * 1000, b"little\n"])
        return archive.written(), False, how
    data = bytearray(archive.written())
    if how == "prefix":
        return rng.choice([b"\0", b"PK\3\4" * 40, bytes(data)]) + data, False, how
    if how == "suffix":
        return bytes(data) + rng.choice([b"\0", _END + bytes(18), bytes(70000), _END * 30]), False, how
    if how == "end":
        place, value = data.rindex(_END) + rng.choice([4, 6, 8, 10]), rng.choice(_BIG) % 2**16
        if rng.random() < 0.5:
            place, value = data.rindex(_END) + rng.choice([12, 16]), rng.choice([*_BIG, rng.randrange(len(data))])
            data[place : place + 4] = struct.pack("<I", value)
        else:
            data[place : place + 2] = struct.pack("<H", value)
        return bytes(data), False, f"{how}: {value}"
    places = [at for at in range(len(data)) if data.startswith(_CENTRAL, at)]
    at = rng.choice(places)
    if how == "overlap":
        others = rng.choice(places)
        for begin, end in ((20, 28), (42, 46)):
            data[at + begin : at + end] = data[others + begin : others + end]
        return bytes(data), False, how
    if how == "zip64":
        length = struct.unpack_from("<H", data, at + 30)[0]
        data[at + 20 : at + 28] = b"\xff" * 8
        if length:
            data[at + 30 : at + 32] = b"\0\0"
        return bytes(data), False, how
    place, size = rng.choice([(6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (42, 4)])
    value = rng.choice([*_BIG, rng.randrange(len(data)), zlib.crc32(bytes(data))]) % 2 ** (8 * size)
    data[at + place : at + place + size] = value.to_bytes(size, "little")
    return bytes(data), False, f"central directory at {place}: {value}"


_TENSORS: list[Callable[[], Any]] = [
    lambda: torch.zeros(1).expand(1 << 40),
    lambda: torch.zeros(1).expand(33, 40),
    lambda: torch.zeros(1).expand(1 << 31, 1 << 30),
    lambda: torch.zeros(33, 40, dtype=torch.complex64),
    lambda: torch.zeros(33, 40).to_sparse(),
    lambda: torch.zeros(33, 40, device="meta"),
    lambda: torch.zeros(33, 40, dtype=torch.float64),
    lambda: torch.zeros(33, 40).to(torch.float8_e4m3fn),
    lambda: torch.zeros(33, 40, dtype=torch.int32),
    lambda: torch.zeros(40, 33).t(),
    lambda: torch.zeros(0, 1 << 40),
    lambda: torch.zeros(99, 120)[::3, ::3],
    lambda: torch.zeros(()),
    lambda: torch.full((33, 40), torch.nan),
    lambda: torch.quantize_per_tensor(torch.zeros(33, 40), 0.1, 1, torch.quint8),
    lambda: torch._neg_view(torch.zeros(33, 40)),
    lambda: torch.nn.Parameter(torch.zeros(33, 40)),
    lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    lambda: torch.zeros((1,) * 40),
]
_OTHERS: list[Callable[[], Any]] = [
    lambda: b"bytes",
    lambda: {1, 2},
    lambda: 1j,
    lambda: torch.float32,
    lambda: torch.Size([1 << 40, 3]),
    lambda: torch.device("cpu"),
    lambda: torch.strided,
    lambda: _nested(90),
    lambda: _nested(90, shared=True),
    lambda: _nested(200),
    lambda: {(1, 2): 3, 1.5: 2, None: 1, True: 0},
    lambda: {i * (2**61 - 1): None for i in range(2000)},
    lambda: "\n" * 1000,
    lambda: (),
    lambda: ("optimizer",),
    lambda: ("model", "x"),
]


def _nested(depth: int, *, shared: bool = False) -> Any:
    value: Any = ()
    for _ in range(depth):
        value = (value, value) if shared else (value,)
    return value


def mutated_objects(rng: Random, content: Any) -> tuple[Any, str]:
    """Objects, changed in place, in which one value or name was replaced; what was done."""
    holder = [content]
    places = list(_places(holder))
    told = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        container, key = rng.choice(places)
        how = rng.choice(["replace", "replace", "replace", "remove", "rename", "copy"])
        value = _value(rng)
        told.append(f"{how} {reprlib.repr(key)} by {type(value).__name__} {reprlib.repr(value)}")
        if how == "copy":
            other = rng.choice(places)
            value = _get(*other) if _has(*other) else None
        if how in ("replace", "copy"):
            _set(container, key, value)
        elif isinstance(container, dict) and key in container:
            taken = container.pop(key)
            if how == "rename":
                name = value if isinstance(value, str | int | float | None) else "a\nb"
                container[name] = taken
    return holder[0], "; ".join(told)


def _value(rng: Random) -> Any:
    values = [value for value in VALUES if not isinstance(value, Raw)]
    return rng.choice([lambda: rng.choice(values), rng.choice(_TENSORS), rng.choice(_OTHERS)])()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where values are: in dicts, lists and attributes."""
    if isinstance(value, dict):
        items = list(value.items())
        yield from ((value, key) for key, _ in items)
    elif isinstance(value, list):
        items = list(enumerate(value))
        yield from ((value, key) for key, _ in items)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | type):
        items = list(vars(value).items())
        yield from ((value, key) for key, _ in items)
    else:
        return
    for _, each in items:
        yield from _places(each)


def _has(container: Any, key: Any) -> bool:
    return isinstance(container, list) or (key in container if isinstance(container, dict) else hasattr(container, key))


def _get(container: Any, key: Any) -> Any:
    return container[key] if isinstance(container, dict | list) else getattr(container, key)


def _set(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, dict | list):
        container[key] = value
    else:
        container.__dict__[key] = value


#: Opcodes that leave one value: some that never end, need memory beyond reason, or change what they should not.
_GADGETS = [
    b")" + b"\x94h\x00" + b"q\x00h\x00\x86" * 60 + b"}h\x00Ns" + b"0",
    b")q\x00" + b"h\x00h\x00\x86q\x00" * 60,
    b"}(" + b")q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"h\x00N" + b"u",
    b"]q\x00" + b"]q\x01(" + b"h\x00" * 50 + b"eq\x00" + (b"](" + b"h\x00" * 50 + b"eq\x00") * 12,
    b"K\x01r\x00\x00\x00\x20",
    b"K\x01r\xff\xff\xff\x7f",
    b")" + b"\x85" * 200_000,
    b"}" + b")" + b"\x85" * 200_000 + b"Ns",
    b"]q\x00h\x00a",
    b"}q\x00K\x01h\x00s",
    b"\x8b\xff\xff\xff\x7f",
    b"\x8b\x10\x27\x00\x00" + b"\x7f" * 10_000,
    b"\x8aA" + b"\x7f" * 65,
    b"X\xff\xff\xff\xff",
    b"\x8e" + struct.pack("<Q", 1 << 40),
    b"\x8d" + struct.pack("<Q", 1 << 62),
    b"\x96" + struct.pack("<Q", 1 << 40),
    b"\x95" + struct.pack("<Q", 1 << 62) + b"N",
    b"I" + b"9" * 20_000 + b"\n",
    b"L" + b"9" * 20_000 + b"L\n",
    b"c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R",
    b"ccollections\nCounter\nc__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R\x85R",
    b"ctorch.storage\nUntypedStorage\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R",
    b"ctorch\nTensor\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R",
    b"ctorch\nTensor\n)\x81",
    b"cos\nsystem\nX\x04\x00\x00\x00true\x85R",
    b"c__builtin__\neval\nX\x01\x00\x00\x001\x85R",
    b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\nN}X\x06\x00\x00\x00__eq__Ns\x86b",
    b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81N}X\x09\x00\x00\x00__class__Ns\x86b",
    b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\x00\x85\x81N}X\x04\x00\x00\x00nameNs\x86b",
    b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x01sb",
    b"ccollections\nOrderedDict\n(]](K\x01K\x02eetR",
    b"ctorch\nSize\n(K\x01](K\x02eetR",
    b"\x82\x01",
    b"P1\n",
    b"K\x01Q",
    b"NQ",
    b"N2\x86",
    b"\x8f(K\x01\x90",
]


def mutated_pickle(rng: Random, data: bytes) -> tuple[bytes, str]:
    """A pickle of which some opcodes are others; what was done."""
    places = [position for _, _, position in pickletools.genops(data)]
    opcodes = [data[a:b] for a, b in zip(places, [*places[1:], len(data)], strict=True)]
    told = []
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20])):
        at = rng.randrange(len(opcodes))
        how = rng.choice(["delete", "twice", "exchange", "opcode", "argument", "argument", "number", "gadget", "value"])
        told.append(f"{how} {at}")
        if how == "delete":
            del opcodes[at]
        elif how == "twice":
            opcodes[at:at] = [opcodes[at]] * rng.choice([1, 1, 1000])
        elif how == "exchange":
            other = rng.randrange(len(opcodes))
            opcodes[at], opcodes[other] = opcodes[other], opcodes[at]
        elif how == "opcode":
            opcodes[at] = rng.choice(pickletools.opcodes).code.encode("latin1") + opcodes[at][1:]
        elif how == "argument" and len(opcodes[at]) > 1:
            position = rng.randrange(1, len(opcodes[at]))
            changed = bytearray(opcodes[at])
            changed[position] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            opcodes[at] = bytes(changed)
        elif how == "number":  # a shape, a stride, an offset, a length
            numbers = [i for i, opcode in enumerate(opcodes) if opcode[:1] in (b"K", b"M", b"J", b"\x8a")]
            if numbers:
                value = rng.choice([0, 1, 2, 64, -1, 2**31 - 1, 2**40, 2**62, 2**63 - 1, 2**63, -(2**63), 2**200])
                text = value.to_bytes(33, "little", signed=True)
                opcodes[rng.choice(numbers)] = b"\x8a" + bytes([len(text)]) + text
        elif how == "gadget":
            gadget = rng.choice(_GADGETS)
            told.append(f"{gadget[:40]!r}")
            opcodes[at] = gadget if rng.random() < 0.7 else gadget + b"0" + opcodes[at]
        elif how == "value":
            opcodes[at] = rng.choice(
                [b"N", b"\x88", b")", b"]", b"}", b"K\x00", b"X\x01\x00\x00\x00a", b"G" + b"\x7f" * 8]
            )
        if not opcodes:
            break
    return b"".join(opcodes), ", ".join(told[:8])
