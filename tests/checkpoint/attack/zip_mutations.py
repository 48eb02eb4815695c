"""Archives as torch.save writes them, and what no torch.save writes: compressed, overlapping, with sizes that lie."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from random import Random

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
