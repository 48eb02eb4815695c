"""Faults while a checkpoint is saved: the old one stays, one save at a time writes, and errors say what happened."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import pickle
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import filelock
import pytest
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from attack.index_file import INDEX
from checkpoint_folder import LOCK, assert_holds, assert_only, flip, saved, the_data_file
from ranks.pool import Pool
from shardopt.checkpoint import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.skipif(sys.platform != "linux", reason="names of open files are read from /proc"),
]

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _raise(error: BaseException) -> Any:
    raise error


def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes some bytes, then no more."""
    pwrite, calls = os.pwrite, iter(range(1000))
    monkeypatch.setattr(os, "pwrite", lambda *args: pwrite(*args) if next(calls) < 2 else _raise(FULL))


def _at_sync(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[str], object]) -> None:
    """Acts on the path of a file of this kind of name when it goes to the disk."""
    fsync = os.fsync

    def acting(file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}")
        if name in path.rpartition("/")[2]:
            act(path)
        fsync(file)

    monkeypatch.setattr(os, "fsync", acting)


FAILURES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "data": _no_room,
    "data sync": lambda monkeypatch: _at_sync(monkeypatch, ".bin", lambda path: _raise(FULL)),
    "index": lambda monkeypatch: _at_sync(monkeypatch, INDEX, lambda path: _raise(FULL)),
    "rename": lambda monkeypatch: monkeypatch.setattr(os, "replace", lambda *args: _raise(FULL)),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    saved(tmp_path, seed=1)
    with monkeypatch.context() as context:
        FAILURES[failure](context)
        with pytest.raises(CheckpointError, match=r"cannot write \d+ bytes: No space left .* previous") as caught:
            saved(tmp_path, seed=2)
    assert str(tmp_path) in str(caught.value)
    assert_only(tmp_path, seed=1)
    saved(tmp_path, seed=2)  # the lock was given back, though the error keeps the save's frames
    assert_only(tmp_path, seed=2)


@pytest.mark.parametrize("interrupted", [saved, assert_holds])
def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: Callable[[Path, int], None]) -> None:
    """At calls of our functions (filelock may keep its own locks): the folder stays whole, and all threads end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores the signal
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)  # in a destructor Python itself ignores it
    saved(tmp_path, 2)
    before, raised = threading.active_count(), []
    for at in itertools.count(1, 7):
        calls = itertools.count(1)

        def entered(frame: FrameType, event: str, argument: Any, calls: Iterator[int] = calls, at: int = at) -> None:
            if event == "call" and "/shardopt/" in frame.f_code.co_filename and next(calls) == at:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

        sys.setprofile(entered)
        try:
            interrupted(tmp_path, 2)
        except BaseException as error:  # another one only where clean-up failed after the interrupt
            raised.append({type(error), type(error.__context__)})
        sys.setprofile(None)
        while threading.active_count() > before:
            time.sleep(0.01)
        assert_holds(tmp_path, 2)
        if next(calls) <= at:
            break
    assert len(raised) > 10
    assert all(KeyboardInterrupt in types for types in raised)
    saved(tmp_path, 3)
    assert_only(tmp_path, 3)


def test_a_folder_below_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"cannot make this folder: .*File exists"):
        saved(tmp_path / "run" / "step", seed=1)


def test_the_commit_is_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it, all data are on the disk and the old checkpoint is whole; after it, the new one, whatever happens."""
    saved(tmp_path, seed=1)
    replace, synced = os.replace, []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))

    def checked(source: str, target: str) -> None:
        data = {path.stat().st_ino for path in tmp_path.glob("*.bin")} - {the_data_file(tmp_path).stat().st_ino}
        assert data
        assert data | {os.stat(source).st_ino} <= set(synced)
        assert_holds(tmp_path, seed=1)
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", checked)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, seed=2)
    assert_holds(tmp_path, seed=2)
    monkeypatch.undo()
    saved(tmp_path, seed=3)
    assert_only(tmp_path, seed=3)


def test_new_folders_outlast_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder that is made is in one that was synchronized afterwards."""
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    saved(tmp_path / "new" / "er" / "folder")
    for folder in (tmp_path, tmp_path / "new", tmp_path / "new" / "er", tmp_path / "new" / "er" / "folder"):
        assert folder.stat().st_ino in synced, folder


def test_strays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left by saves that died. Only what has our names is removed, and nothing that may be in use."""
    saved(tmp_path)
    strays = ["0123456789abcdef-0.bin", "0123456789abcdef-17.bin", f"{INDEX}.0123456789abcdef"]
    others = ["notes.txt", "0123456789abcdef.bin", f"{INDEX}.backup"]
    for name in [*strays, *others]:
        (tmp_path / name).write_text("text")
    (tmp_path / "fedcba9876543210-0.bin").mkdir()  # cannot be removed as a file, which is no error
    saved(tmp_path, seed=1)
    (tmp_path / "fedcba9876543210-0.bin").rmdir()
    assert {*os.listdir(tmp_path)} == {the_data_file(tmp_path).name, INDEX, LOCK, *others}
    for name in others:
        (tmp_path / name).unlink()
    data, index = the_data_file(tmp_path), (tmp_path / INDEX).read_bytes()
    flip(tmp_path / INDEX, 100)  # what it had is not known now, but may be again
    with monkeypatch.context() as context:
        _no_room(context)
        with pytest.raises(CheckpointError):
            saved(tmp_path, seed=2)
    assert data.exists()
    (tmp_path / INDEX).write_bytes(index)
    assert_only(tmp_path, seed=1)
    flip(tmp_path / INDEX, 100)
    saved(tmp_path, seed=2)
    assert_only(tmp_path, seed=2)


def test_a_full_disk_locks_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strays of a save that died fill it, and go before the next save writes."""
    saved(tmp_path, seed=1)
    stray, pwrite = tmp_path / "0123456789abcdef-0.bin", os.pwrite
    stray.write_text("all there is room for")
    monkeypatch.setattr(os, "pwrite", lambda *args: _raise(FULL) if stray.exists() else pwrite(*args))
    saved(tmp_path, seed=2)
    assert_only(tmp_path, seed=2)


def test_data_of_another_save_that_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without locks, where a second save removes the first one's data."""
    saved(tmp_path, seed=1)
    with monkeypatch.context() as context:
        _at_sync(context, ".bin", os.unlink)
        with pytest.raises(CheckpointError, match=r"cannot be found .* left alone by other saves"):
            saved(tmp_path, seed=3)
    assert_only(tmp_path, seed=1)


def test_a_data_file_is_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    token = the_data_file(tmp_path).name.partition("-")[0]
    monkeypatch.setattr(secrets, "token_hex", lambda _: token)
    with pytest.raises(CheckpointError, match="File exists"):
        saved(tmp_path, seed=1)
    assert_only(tmp_path)


# --- the lock


def _forked(work: Callable[[], object]) -> int:
    """A child process that does some work and then waits to be killed; returns once the work is done."""
    done, write = os.pipe()
    child = os.fork()
    if child == 0:
        kept = work()
        os.write(write, b"done")
        time.sleep(60)
        os._exit(kept is None)
    assert os.read(done, 4) == b"done"
    os.close(done)
    os.close(write)
    return child


def _acquired(folder: Path) -> FileLock:
    lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
    lock.acquire()
    return lock


def test_a_second_saver_is_refused_until_the_first_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by being killed, and while its own children live on, as workers of a DataLoader do."""
    saved(tmp_path, seed=1)
    read, write = os.pipe()

    def acquire_and_fork() -> FileLock:
        lock = _acquired(tmp_path)
        os.write(write, _forked(lambda: None).to_bytes(4, "little"))
        return lock

    other = _forked(acquire_and_fork)
    grandchild = int.from_bytes(os.read(read, 4), "little")
    monkeypatch.setattr(filelock, "FileLock", lambda path, timeout, **how: FileLock(path, timeout / 50, **how))
    with pytest.raises(CheckpointError, match="got another save into this folder, expected one at a time; wait for it"):
        saved(tmp_path, seed=2)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert_only(tmp_path, seed=1)
    saved(tmp_path, seed=2)
    os.kill(grandchild, signal.SIGKILL)
    assert_only(tmp_path, seed=2)


def test_a_lock_taken_while_its_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save locks the new file, which no other process can lock then."""
    flock, files, replace, refused = fcntl.flock, [tmp_path / LOCK], os.replace, []

    def late(descriptor: int, operation: int) -> None:
        if files:
            files.pop().unlink()
        flock(descriptor, operation)

    def locked(*args: str) -> None:
        with pytest.raises(Timeout):
            _acquired(tmp_path)
        refused.append(True)
        replace(*args)

    monkeypatch.setattr(fcntl, "flock", late)
    monkeypatch.setattr(os, "replace", locked)
    saved(tmp_path)
    assert refused
    assert_only(tmp_path)


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *args: _raise(OSError(error, os.strerror(error))))
    with pytest.warns(RuntimeWarning, match="has no locks; make sure that only one run saves into this folder"):
        saved(tmp_path)
    assert_only(tmp_path)


def test_a_lock_elsewhere_is_refused(tmp_path: Path) -> None:
    """A lock that is a link to somewhere else: the file there is neither emptied nor made; or that is no file."""
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir()
    (folder / LOCK).symlink_to(victim)
    refused = f"{LOCK}: cannot be locked: .*; choose another path"
    for content in (None, "precious"):
        if content is not None:
            victim.write_text(content)
        with pytest.raises(CheckpointError, match=refused):
            saved(folder)
        assert (victim.read_text() if victim.exists() else None) == content
    (folder / LOCK).unlink()
    (folder / LOCK).mkdir()
    with pytest.raises(CheckpointError, match=refused):
        saved(folder)


# --- loads beside saves


@pytest.mark.parametrize("times", [9, 10])
def test_a_load_that_is_overtaken_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Another checkpoint is saved each time when a load is about to open the data, so many times; ten are too many."""
    saved(tmp_path)
    saves, opened = [0], os.open

    def replacing(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(name).endswith(".bin") and flags & os.O_ACCMODE == os.O_RDONLY and saves[0] < times:
            saves[0] += 1
            saved(tmp_path, seed=saves[0])
        return opened(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", replacing)
    if times == 10:
        with pytest.raises(CheckpointError, match="another checkpoint was saved there while this one was loaded; load"):
            assert_holds(tmp_path)
    else:
        assert_holds(tmp_path, seed=times)
    assert saves == [times]


def test_nothing_is_unpickled_and_parts_of_writes_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, position: pwrite(file, data[:5], position))
    monkeypatch.setattr(os, "preadv", lambda file, data, position: preadv(file, [data[0][:7]], position))
    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        monkeypatch.setattr(module, name, lambda *args, **kwargs: _raise(AssertionError("something was unpickled")))
    saved(tmp_path)
    assert_only(tmp_path)


def _load_with_an_old_index_on_one_rank(path: Path) -> int:
    """Rank 1 sees the index as it was before the last save, when it first reads it; returns how often it reads it."""
    old = path.with_name(f"old index {dist.get_rank()}")
    old.write_bytes((path / INDEX).read_bytes())
    dist.barrier()
    saved(path, seed=1)
    opened, reads = os.open, []

    def late(name: Any, *args: Any, **kwargs: Any) -> int:
        if str(name).endswith(INDEX):
            reads.append(name)
            name = old if len(reads) == dist.get_rank() == 1 else name
        return opened(name, *args, **kwargs)

    os.open = late
    try:
        assert_holds(path, seed=1)
    finally:
        os.open = opened
    return len(reads)


def test_ranks_agree_on_one_checkpoint(ranks: Pool, tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint")
    assert ranks.run(2, _load_with_an_old_index_on_one_rank, tmp_path / "checkpoint") == [2, 2]
