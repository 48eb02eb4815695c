"""One save at a time in a folder: the lock, and who cannot hold it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_folder import assert_only, saved
from shardopt.checkpoint import CheckpointError, folder_lock
from shardopt.checkpoint.folder_lock import LOCK_NAME, FolderLock

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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


def _end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_second_saver_is_told_by_whom_the_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, seed=1)
    monkeypatch.setattr(folder_lock, "_PATIENCE", 0.2)
    other = _forked(FolderLock(tmp_path).acquire)
    with pytest.raises(CheckpointError, match=f"got another save into this folder, by process {other} on .*, expected"):
        saved(tmp_path, seed=2)
    _end(other)
    assert_only(tmp_path, seed=1)
    saved(tmp_path, seed=2)
    assert_only(tmp_path, seed=2)


def test_a_second_saver_waits_for_the_first(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    first.acquire()
    timer = threading.Timer(0.3, first.release)
    timer.start()
    begin = time.monotonic()
    saved(tmp_path)
    assert time.monotonic() - begin > 0.25
    timer.join()
    assert_only(tmp_path)


def test_who_waits_while_the_folder_is_removed_makes_it_anew(tmp_path: Path) -> None:
    """And holds the lock of the new one, not that of the file that was removed."""
    folder = tmp_path / "step-1"
    folder.mkdir()
    first, second = FolderLock(folder), FolderLock(folder)
    first.acquire()
    assert second.try_acquire() is False
    waiting = threading.Thread(target=second.acquire)
    waiting.start()
    shutil.rmtree(folder)
    first.release()
    waiting.join()
    assert os.listdir(folder) == [LOCK_NAME]
    assert first.try_acquire() is False


def test_a_lock_taken_while_its_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, files = fcntl.flock, [tmp_path / LOCK_NAME]

    def late(descriptor: int, operation: int) -> None:
        if files:
            files.pop().unlink()
        flock(descriptor, operation)

    first = FolderLock(tmp_path)
    with monkeypatch.context() as context:
        context.setattr(fcntl, "flock", late)
        first.acquire()
    assert FolderLock(tmp_path).try_acquire() is False


def test_the_children_of_a_dead_saver_do_not_hold_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As workers of a DataLoader that outlive it."""
    monkeypatch.setattr(folder_lock, "_PATIENCE", 0.5)
    read, write = os.pipe()

    def acquire_and_fork() -> FolderLock:
        lock = FolderLock(tmp_path)
        lock.acquire()
        grandchild = _forked(lambda: None)
        os.write(write, grandchild.to_bytes(4, "little"))
        return lock

    saver = _forked(acquire_and_fork)
    grandchild = int.from_bytes(os.read(read, 4), "little")
    with pytest.raises(CheckpointError, match="got another save"):
        saved(tmp_path)
    _end(saver)
    saved(tmp_path)
    os.kill(grandchild, signal.SIGKILL)
    assert_only(tmp_path)


def test_a_failed_save_lets_others_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, seed=1)
    with monkeypatch.context() as context:
        context.setattr(os, "fsync", _no_room)
        with pytest.raises(CheckpointError, match="No space left"):
            saved(tmp_path, seed=2)
    FolderLock(tmp_path).acquire()
    assert_only(tmp_path, seed=1)


def _no_room(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_locks_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strays of a save that died fill it, and go before the next save writes."""
    saved(tmp_path, seed=1)
    stray = tmp_path / "0123456789abcdef-0.bin"
    stray.write_text("all there is room for")
    pwrite = os.pwrite

    def pwrite_if_room(descriptor: int, data: bytes, offset: int) -> int:
        if stray.exists():
            _no_room(descriptor)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite_if_room)
    saved(tmp_path, seed=2)
    assert_only(tmp_path, seed=2)


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(RuntimeWarning, match="has no locks; make sure that only one run saves into this folder"):
        saved(tmp_path)
    assert_only(tmp_path)


@pytest.mark.parametrize("kind", ["file", "missing", "FIFO"])
def test_a_lock_elsewhere_is_refused(tmp_path: Path, kind: str) -> None:
    """A lock that is a link to somewhere else: the file there is neither emptied nor made."""
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir()
    if kind == "FIFO":
        os.mkfifo(folder / LOCK_NAME)
    else:
        (folder / LOCK_NAME).symlink_to(victim)
    if kind == "file":
        victim.write_text("precious")
    got = "something else" if kind == "FIFO" else "a symbolic link"
    with pytest.raises(CheckpointError, match=f"{LOCK_NAME}: cannot be locked: .*got {got}, expected a .*; choose"):
        saved(folder)
    assert (victim.read_text() if kind == "file" else victim.exists()) == ("precious" if kind == "file" else False)


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).mkdir()
    with pytest.raises(CheckpointError, match=f"{LOCK_NAME}: cannot be locked"):
        saved(tmp_path)
