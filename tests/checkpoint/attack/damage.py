"""Damaged files: mutations of a checkpoint's data files and of its index's bytes, without a new checksum.

A load must refuse with a CheckpointError that names the folder, and has then changed nothing, unless the mutation
changed nothing that is read: then all bits must be right.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from attack import hostile
from attack.contents import content
from attack.forked import Outcome, call, fault, shown
from attack.index_file import INDEX


def prepare(base: Path) -> None:
    """Saves a checkpoint of several data files, and a later one of a single file."""
    hostile.prepare(base)
    content(2).save(base / "other", {"k": 2})


def attack(seed: int, number: int, base: Path) -> Outcome:
    """Loads what one mutation of files makes of a checkpoint."""
    rng = Random(f"damage {seed} {number}")
    folder = base / "checkpoint"
    if folder.is_dir() and not folder.is_symlink():
        folder.chmod(0o700)
        shutil.rmtree(folder)
    elif os.path.lexists(folder):
        folder.unlink()
    shutil.copytree(base / "pristine", folder)
    mutate = rng.choice(MUTATIONS)
    data = sorted(path.name for path in folder.glob("*.bin"))
    name = INDEX if rng.random() < 0.4 else rng.choice(data)
    details = mutate(rng, folder / name) if number else ""
    outcome = call(lambda: _check(folder, must_succeed=number == 0))
    if (folder / name).is_symlink() and outcome.kind == "loaded":
        outcome = fault("a link was followed out of the folder", str(outcome))
    shown_name = INDEX if name == INDEX else f"data file {data.index(name)}"
    return outcome._replace(attack=f"{mutate.__name__.strip('_')} of {shown_name}: {details}")


def _check(folder: Path, must_succeed: bool) -> Outcome:
    libc = ctypes.CDLL(None, use_errno=True)  # gives up what root may do, reading what nobody may among it
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    return hostile.check(folder, with_optimizer=True, must_succeed=must_succeed)


def _flip(rng: Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    bits = [(rng.randrange(len(content)), rng.randrange(8)) for _ in range(rng.choice([1, 1, 1, 2, 8, 100]))]
    for place, bit in bits:
        content[place] ^= 1 << bit
    path.write_bytes(content)
    return shown(bits)


def _range(rng: Random, path: Path) -> str:
    """Some bytes of a file, or all up to its beginning or end, are other bytes, or more of them, or gone."""
    content = path.read_bytes()
    size = len(content)
    edges = [0, 1, size // 2, size - 64, size - 1, size, *(rng.randrange(size) for _ in range(4))]
    start = rng.choice(edges)
    end = min(start + rng.choice([0, 1, 4, 64, 256, 4096, size]), size)
    there, elsewhere = content[start:end], rng.randrange(size)
    others = {
        "zero": bytes(len(there)),
        "random": rng.randbytes(len(there)),
        "gone": b"",
        "moved": content[elsewhere : elsewhere + len(there)],
        "more": there + rng.choice([b"\0", b"\n", b" ", b"}", b"\0" * 64, content, rng.randbytes(1000)]),
    }
    how = rng.choice(list(others))
    path.write_bytes(content[:start] + others[how] + content[end:])
    return f"{start} to {end} of {size} {how}"


def _exchange(rng: Random, path: Path) -> str:
    other = rng.choice(sorted(entry for entry in path.parent.iterdir() if entry != path))
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)
    return f"with {'the index' if other.name == INDEX else 'another data file'}"


def _copy_over(rng: Random, path: Path) -> str:
    """The bytes of another file of this checkpoint or of another one."""
    source = path.parent.with_name(rng.choice(["pristine", "other"]))
    files = sorted(entry for entry in source.iterdir() if entry.name != path.name or source.name != "pristine")
    shutil.copyfile(rng.choice([entry for entry in files if entry.suffix == path.suffix] or files), path)
    return f"by one of the checkpoint {source.name}"


def _replace(rng: Random, path: Path) -> str:
    """A file, or the folder, by something that is none, or none of its own."""
    if rng.random() < 0.3:
        path = path.parent
    aside = path.with_name("aside folder") if path.is_dir() else path.parent.with_name("aside file")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    links = {"loop": path.name, "link": str(aside), "nowhere": "/nowhere/at all"}
    how = rng.choice(["nothing", "folder", "empty", "FIFO", "socket", "/dev/zero", "/etc/passwd", "/dev/full", *links])
    if how == "folder":
        path.mkdir()
    elif how == "empty":
        path.touch()
    elif how == "FIFO":
        os.mkfifo(path)
    elif how == "socket":
        os.mknod(path, 0o140666)
    elif how != "nothing":
        path.symlink_to(links.get(how, how))
    return f"{path.suffix} {how}"


def _forbid(rng: Random, path: Path) -> str:
    how = rng.choice(["file", "folder", "entering"])
    (path if how == "file" else path.parent).chmod({"file": 0, "folder": 0, "entering": 0o600}[how])
    return how


def _sparse(rng: Random, path: Path) -> str:
    length = rng.choice([path.stat().st_size + 1, 1 << 20, 1 << 26] + ([1 << 40] if path.name != INDEX else []))
    os.truncate(path, length)
    return f"of {length} bytes"


#: The more often, the more likely.
MUTATIONS: list[Callable[[Random, Path], str]] = [
    *([_range] * 8),
    *([_flip] * 5),
    *([_replace] * 3),
    *(_exchange, _copy_over, _forbid, _sparse),
]
