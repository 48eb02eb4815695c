"""``keep_last`` among debris, on a disk and in an object store, beside another job that saves, and killed meanwhile.

By turns: a folder of debris on a disk; one in an object store; a save of another job into one of the older folders; a
kill while older checkpoints are removed, after which the next save removes the rest.
"""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import warnings
from pathlib import Path
from random import Random

from filelock import FileLock
from fsspec.implementations.memory import MemoryFileSystem

from attack.contents import Known
from attack.forked import Child, Outcome, Tell, call, fault, ok, shown
from attack.index_file import INDEX
from attack.signals import die_at

_known: list[Known] = []

LOCK = "checkpoint.lock"
#: Contents of a folder of an older number: whether it counts as a checkpoint, and whether ``keep_last`` removes it.
DEBRIS = {
    "whole": (True, True),
    "whole, notes": (True, True),
    "data": (False, True),
    "data, another's": (False, True),
    "data, notes": (False, True),
    "lock": (False, True),
    "unfinished": (False, True),
    "nothing": (False, True),
    "notes": (False, False),
    "damaged": (False, False),
    "link": (False, False),
    "file": (False, False),
    "locked": (False, False),
}


def prepare(base: Path) -> None:
    """Makes two contents, and a checkpoint of the first."""
    warnings.filterwarnings("error", message=".*cannot be removed.*")
    _known.append(Known(2))
    _known[-1].save(base / "whole", 0)


def attack(seed: int, number: int, base: Path) -> Outcome:
    """One of the four, by turns."""
    rng = Random(f"retention {seed} {number}")
    shutil.rmtree(base / "runs", ignore_errors=True)
    (base / "runs").mkdir()
    kind = [_on_disk, _in_store, _beside_another, _killed][number % 4]
    outcome = kind(rng, base)
    return outcome._replace(attack=f"{kind.__name__.strip('_')}: {outcome.attack}")


def _on_disk(rng: Random, base: Path) -> Outcome:
    kinds = [rng.choice(list(DEBRIS)) for _ in range(rng.randint(1, 9))]
    keep_last = rng.randint(1, 3)
    return call(lambda: _removes(base, kinds, keep_last))._replace(attack=f"{kinds} {keep_last}")


def _removes(base: Path, kinds: list[str], keep_last: int) -> Outcome:
    locks = [_fill(base, base / "runs" / f"step-{i}", kind) for i, kind in enumerate(kinds)]
    before = _content(base / "runs")
    _known[-1].save(base / "runs" / f"step-{len(kinds)}", 1, keep_last=keep_last)
    outcome = _judged(base, kinds, keep_last, before)
    assert len(locks) == len(kinds)
    return outcome


def _fill(base: Path, folder: Path, kind: str) -> FileLock | None:
    """Makes debris; returns the lock that another job holds."""
    if kind == "link":
        folder.symlink_to(base / "whole")
    elif kind == "file":
        folder.touch()
    elif kind.startswith("whole") or kind == "damaged":
        shutil.copytree(base / "whole", folder)
    else:
        folder.mkdir()
    if kind in ("data", "data, notes", "data, another's", "locked"):
        (folder / "0123456789abcdef-0.bin").write_bytes(b"data")
    if kind == "data, another's":
        (folder / f"{INDEX}.0123456789abcdef").touch()
        (folder / "fedcba9876543210-17.bin").touch()
    if kind in ("lock", "unfinished", "data, notes"):
        (folder / LOCK).touch()
    if kind == "unfinished":
        (folder / f"{INDEX}.0123456789abcdef").write_text("{")
    if kind.endswith("notes"):
        (folder / "notes.txt").touch()
    if kind == "damaged":
        text = (folder / INDEX).read_text()
        (folder / INDEX).write_text(text.replace('"shape": [', '"shape": [1, '))
    if kind != "locked":
        return None
    lock = FileLock(folder / LOCK)
    lock.acquire()
    return lock


def _content(runs: Path) -> dict[str, list[str] | None]:
    return {path.name: sorted(os.listdir(path)) if path.is_dir() else None for path in runs.iterdir()}


def _judged(base: Path, kinds: list[str], keep_last: int, before: dict[str, list[str] | None]) -> Outcome:
    expected, kept = {}, 1
    for i, kind in reversed(list(enumerate(kinds))):
        is_checkpoint, goes = DEBRIS[kind]
        kept += is_checkpoint
        name = f"step-{i}"
        if not goes or (is_checkpoint and kept <= keep_last):
            expected[name] = before[name]
        elif kind.endswith("notes"):
            expected[name] = ["notes.txt"]
    found = _content(base / "runs")
    newest = f"step-{len(kinds)}"
    if len(found.pop(newest) or ()) != 3:
        return fault("the newest is not whole")
    if found != expected:
        return fault("other files are left", f"{found}, expected {expected}")
    if _known[-1].load(base / "runs" / newest)[0] != 1:
        return fault("the newest is another")
    for name, names in expected.items():
        is_readable = name in before and INDEX in (names or ()) and kinds[int(name[5:])] != "damaged"
        if is_readable and _known[-1].load(base / "runs" / name)[0] != 0:
            return fault("an older one is another", name)
    return ok("debris went, and nothing else")


def _in_store(rng: Random, base: Path) -> Outcome:
    folders = []
    for _ in range(rng.randint(1, 6)):
        has_index, has_notes = rng.random() < 0.3, rng.random() < 0.3
        hours = [rng.choice([0.0, 1.0, 23.9, 24.1, 100.0]) for _ in range(rng.randint(0 if not has_index else 1, 3))]
        folders.append((has_index, has_notes, hours))
    return call(lambda: _in_store_removes(base, folders, rng.randint(1, 3)))._replace(attack=shown(folders))


def _in_store_removes(base: Path, folders: list[tuple[bool, bool, list[float]]], keep_last: int) -> Outcome:
    store = MemoryFileSystem()
    expected, kept = set(), 1
    for i, (has_index, has_notes, hours) in reversed(list(enumerate(folders))):
        kept += has_index
        goes = kept > keep_last if has_index else bool(hours) and min(hours) > 24
        root = f"/runs/step-{i}"
        names = [f"0123456789abcde{n}-{n}.bin" for n in range(len(hours))]
        for name, age in zip(names, hours, strict=True):
            store.pipe_file(f"{root}/{name}", b"data")
            store.store[f"{root}/{name}"].modified -= datetime.timedelta(hours=age)
        if has_index:
            for path in (base / "whole").glob("*"):
                if path.name != LOCK:
                    names.append(path.name)
                    store.pipe_file(f"{root}/{path.name}", path.read_bytes())
        expected |= set() if goes else {f"{root}/{name}" for name in names}
        if has_notes:
            store.pipe_file(f"{root}/notes.txt", b"notes")
            expected.add(f"{root}/notes.txt")
    _known[-1].save(f"memory://runs/step-{len(folders)}", 1, keep_last=keep_last)
    found = {path for path in store.store if not path.startswith(f"/runs/step-{len(folders)}/")}
    if found != expected:
        return fault("other objects are left", f"{sorted(found - expected)}, {sorted(expected - found)}")
    k, _ = _known[-1].load(f"memory://runs/step-{len(folders)}")
    return ok("old objects went, and nothing else") if k == 1 else fault("the newest is another")


def _beside_another(rng: Random, base: Path) -> Outcome:
    """Another job saves into an older folder, again and again; none of its saves may fail."""
    folder, asynchronously = base / "runs" / "step-1", rng.random() < 0.3

    def save(tell: Tell) -> None:
        try:
            for turn in range(25):
                _known[-1].save(folder, turn % 2, asynchronously=asynchronously)
        except BaseException as error:
            tell(f"{type(error).__name__}: {error}")
        else:
            tell("")

    def remove(tell: Tell) -> None:
        try:
            for step in range(2, 27):
                _known[-1].save(base / "runs" / f"step-{step}", step % 2, keep_last=1)
        except BaseException as error:
            tell(f"{type(error).__name__}: {error}")
        else:
            tell("")

    children = [Child(save), Child(remove)]
    ends = [child.end()[0] for child in children]
    said = [child.told[0] if child.told else f"died with {end}" for child, end in zip(children, ends, strict=True)]
    if any(said):
        return fault("a save failed", shown(said))
    return call(lambda: _both_whole(base))


def _both_whole(base: Path) -> Outcome:
    found = sorted(os.listdir(base / "runs"))
    if not {"step-26"} <= set(found) <= {"step-1", "step-26"}:
        return fault("others are left", shown(found))
    loads = [_known[-1].load(base / "runs" / name)[0] for name in found]
    return ok("both saved") if loads == [0] * len(found) else fault("others were saved", shown(loads))


def _killed(rng: Random, base: Path) -> Outcome:
    kinds = [rng.choice(["whole", "data", "whole, notes", "lock", "nothing"]) for _ in range(4)]
    calls, before = rng.randrange(1, 60), rng.random() < 0.5
    for i, kind in enumerate(kinds):
        _fill(base, base / "runs" / f"step-{i}", kind)

    def save(tell: Tell) -> None:
        die_at(calls, before)
        _known[-1].save(base / "runs" / "step-4", 1, keep_last=1)

    status, _ = Child(save).end()
    outcome = call(lambda: _completed(base, kinds, (base / "runs" / "step-4" / INDEX).exists()))
    return outcome._replace(attack=f"{kinds}, {'killed' if status == -signal.SIGKILL else 'done'} at {calls}")


def _completed(base: Path, kinds: list[str], was_complete: bool) -> Outcome:
    def load(name: str) -> int | None:
        return _known[-1].load(base / "runs" / name)[0]

    if was_complete and load("step-4") != 1:
        return fault("the newest is another")
    if not was_complete:
        for i, kind in enumerate(kinds):
            if kind.startswith("whole") and load(f"step-{i}") != 0:
                return fault("an older one went before the newest was complete")
    _known[-1].save(base / "runs" / "step-5", 0, keep_last=1)
    expected = {f"step-{i}": ["notes.txt"] for i, kind in enumerate(kinds) if kind.endswith("notes")}
    found = _content(base / "runs")
    if len(found.pop("step-5") or ()) != 3 or found != expected:
        return fault("other files are left", shown(found))
    return ok("the next save removed the rest") if load("step-5") == 0 else fault("the next one is another")
