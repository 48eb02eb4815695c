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

from attack.contents import Known
from attack.forked import Outcome, call, fault, ok, shown
from attack.hostile import refused, wrong_with_header
from attack.index_file import INDEX
from attack.recut import recut

_known: list[Known] = []

#: Seconds after which a load counts as hung: what waits for a writer to a FIFO waits for ever.
HUNG = 20.0


def prepare(base: Path) -> None:
    """Saves a checkpoint of several data files, a later one of them, and one of a single file."""
    known = Known(2)
    _known.append(known)
    known.save(base / "whole", 0)
    recut(base / "whole")
    known.save(base / "other", 1)
    known.save(base / "former", 0)


def attack(seed: int, number: int, base: Path) -> Outcome:
    """Loads what one mutation of files makes of a checkpoint."""
    rng = Random(f"damage {seed} {number}")
    folder = base / "checkpoint"
    remove(folder)
    shutil.copytree(base / "whole", folder)
    mutate = rng.choice(MUTATIONS)
    data = sorted(path.name for path in folder.glob("*.bin"))
    name = INDEX if rng.random() < 0.4 else rng.choice(data)
    details = "" if number == 0 else mutate(rng, folder / name)
    outcome = call(lambda: _check(folder), hung=HUNG)
    if (folder / name).is_symlink() and outcome.kind == "right all the same":
        outcome = fault("a link was followed out of the folder", str(outcome))
    if number == 0 and outcome.kind != "right all the same":
        outcome = fault("refused without damage", str(outcome))
    shown_name = INDEX if name == INDEX else f"data file {data.index(name)}"
    return outcome._replace(attack=f"{mutate.__name__.strip('_')} of {shown_name}: {details}")


def _check(folder: Path) -> Outcome:
    be_anybody()
    known = _known[-1]
    before = known.target.fingerprint()
    if wrong := wrong_with_header(folder):
        return wrong
    try:
        k, extra = known.load(folder)
    except BaseException as error:
        changed = known.target.difference(before)
        return fault("changed by a load that failed", changed) if changed else refused(error, folder)
    return ok("right all the same") if k == 0 else fault("damage went unnoticed", f"{k} {shown(extra)}")


def be_anybody() -> None:
    """Gives up what root may do, reading what nobody may among it; of this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    libc.capset(version_3, (ctypes.c_uint32 * 6)())


def _flip(rng: Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    bits = [(rng.randrange(len(content)), rng.randrange(8)) for _ in range(rng.choice([1, 1, 1, 2, 8, 100]))]
    for place, bit in bits:
        content[place] ^= 1 << bit
    path.write_bytes(content)
    return shown(bits)


def _truncate(rng: Random, path: Path) -> str:
    size = path.stat().st_size
    length = rng.choice([0, 1, size - 1, size - 64, size // 2, rng.randrange(size)])
    os.truncate(path, length)
    return f"to {length} of {size}"


def _extend(rng: Random, path: Path) -> str:
    more = rng.choice([b"\0", b"\n", b" ", b"}", b"\0" * 64, path.read_bytes(), rng.randbytes(rng.randrange(1, 5000))])
    before = rng.random() < 0.3
    path.write_bytes(more + path.read_bytes() if before else path.read_bytes() + more)
    return f"by {len(more)} {'before' if before else 'after'}"


def _zero(rng: Random, path: Path) -> str:
    return _overwrite(rng, path, bytes)


def _random(rng: Random, path: Path) -> str:
    return _overwrite(rng, path, rng.randbytes)


def _overwrite(rng: Random, path: Path, values: Callable[[int], bytes]) -> str:
    content = path.read_bytes()
    start = rng.choice([0, rng.randrange(len(content))])
    end = min(start + rng.choice([1, 64, 4096, rng.randrange(1, len(content) + 1)]), len(content))
    path.write_bytes(content[:start] + values(end - start) + content[end:])
    return f"{start} to {end}"


def _exchange_ranges(rng: Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    length = rng.choice([1, 4, 64, 256])
    a, b = (rng.randrange(len(content) - length) for _ in range(2))
    content[a : a + length], content[b : b + length] = content[b : b + length], content[a : a + length]
    path.write_bytes(content)
    return f"{length} bytes at {a} and {b}"


def _remove_range(rng: Random, path: Path) -> str:
    content = path.read_bytes()
    start, length = rng.randrange(len(content)), rng.choice([1, 2, 64, 1000])
    path.write_bytes(content[:start] + content[start + length :])
    return f"{length} bytes at {start}"


def _exchange_files(rng: Random, path: Path) -> str:
    other = rng.choice(sorted(entry for entry in path.parent.iterdir() if entry != path))
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)
    return f"with {'the index' if other.name == INDEX else 'another data file'}"


def _copy_over(rng: Random, path: Path) -> str:
    """The bytes of another file of this checkpoint or of another one."""
    source = path.parent.with_name(rng.choice(["whole", "other", "former"]))
    files = sorted(entry for entry in source.iterdir() if entry.name != path.name or source.name != "whole")
    chosen = rng.choice([entry for entry in files if entry.suffix == path.suffix] or files)
    shutil.copyfile(chosen, path)
    return f"by one of the checkpoint {source.name}"


def _delete(rng: Random, path: Path) -> str:
    path.unlink()
    return ""


def _replace(rng: Random, path: Path) -> str:
    """By something that is no file, or none of its own."""
    aside = path.parent.with_name("aside")
    shutil.copyfile(path, aside)
    path.unlink()
    links = {"loop": path.name, "copy": str(aside), "none": "/nowhere/at all"}
    how = rng.choice(["folder", "empty", "FIFO", "socket", "/dev/zero", "/etc/passwd", "/dev/full", *links])
    if how == "folder":
        path.mkdir()
    elif how == "empty":
        path.touch()
    elif how == "FIFO":
        os.mkfifo(path)
    elif how == "socket":
        os.mknod(path, 0o140666)
    else:
        path.symlink_to(links.get(how, how))
    return how


def _forbid(rng: Random, path: Path) -> str:
    how = rng.choice(["file", "folder", "entering"])
    (path if how == "file" else path.parent).chmod({"file": 0, "folder": 0, "entering": 0o600}[how])
    return how


def _replace_folder(rng: Random, path: Path) -> str:
    folder = path.parent
    shutil.rmtree(folder)
    how = rng.choice(["nothing", "file", "empty", "FIFO", "loop", "link"])
    if how == "file":
        folder.touch()
    elif how == "empty":
        folder.mkdir()
    elif how == "FIFO":
        os.mkfifo(folder)
    elif how in ("loop", "link"):
        folder.symlink_to(folder.name if how == "loop" else "whole")
    return how


def _sparse(rng: Random, path: Path) -> str:
    length = rng.choice([path.stat().st_size + 1, 1 << 20, 1 << 26] + ([1 << 40] if path.name != INDEX else []))
    os.truncate(path, length)
    return f"of {length} bytes"


#: The more often, the more likely.
MUTATIONS: list[Callable[[Random, Path], str]] = [
    *([_flip] * 5),
    *([_truncate, _extend, _zero, _random, _exchange_ranges, _replace] * 2),
    *(_remove_range, _exchange_files, _copy_over, _delete, _forbid, _replace_folder, _sparse),
]


OF_SEVERAL_FILES = (_exchange_files, _copy_over)


def remove(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        folder.unlink()
    elif folder.exists():
        folder.chmod(0o700)
        shutil.rmtree(folder)
