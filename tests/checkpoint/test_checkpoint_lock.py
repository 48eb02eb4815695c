"""One save at a time in a folder: who waits for the lock, who cannot hold it, and what happens where it fails."""

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
from filelock import FileLock, Timeout

from checkpoint_folder import assert_only, saved
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint import saving as saving_module

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LOCK = "checkpoint.lock"


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
    lock = FileLock(folder / LOCK, timeout=0)
    lock.acquire()
    return lock


def test_a_second_saver_is_refused_until_the_first_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by being killed, and while its own children live on, as workers of a DataLoader do."""
    saved(tmp_path, seed=1)
    monkeypatch.setattr(saving_module, "_PATIENCE", 0.2)
    read, write = os.pipe()

    def acquire_and_fork() -> FileLock:
        lock = _acquired(tmp_path)
        os.write(write, _forked(lambda: None).to_bytes(4, "little"))
        return lock

    other = _forked(acquire_and_fork)
    grandchild = int.from_bytes(os.read(read, 4), "little")
    with pytest.raises(CheckpointError, match="got another save into this folder, expected one at a time; wait for it"):
        saved(tmp_path, seed=2)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert_only(tmp_path, seed=1)
    saved(tmp_path, seed=2)
    os.kill(grandchild, signal.SIGKILL)
    assert_only(tmp_path, seed=2)


def test_a_second_saver_waits_for_the_first(tmp_path: Path) -> None:
    first = FileLock(tmp_path / LOCK, thread_local=False)
    first.acquire()
    timer = threading.Timer(0.3, first.release)
    timer.start()
    begin = time.monotonic()
    saved(tmp_path)
    assert time.monotonic() - begin > 0.25
    timer.join()
    assert_only(tmp_path)


def test_who_waits_while_the_folder_is_removed_makes_it_again(tmp_path: Path) -> None:
    """And holds the lock of the new one, not that of the file that was removed."""
    folder = tmp_path / "step-1"
    folder.mkdir()
    first = _acquired(folder)
    waiting = threading.Thread(target=saved, args=(folder,))
    waiting.start()
    time.sleep(0.2)
    shutil.rmtree(folder)
    first.release()
    waiting.join()
    assert_only(folder)


def test_a_lock_taken_while_its_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save locks the new file, which no other process can lock then."""
    flock, files = fcntl.flock, [tmp_path / LOCK]
    commit, refused = saving_module.Saving._commit, []

    def late(descriptor: int, operation: int) -> None:
        if files:
            files.pop().unlink()
        flock(descriptor, operation)

    def locked(*args: object) -> None:
        with pytest.raises(Timeout):
            _acquired(tmp_path)
        refused.append(True)
        commit(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", late)
    monkeypatch.setattr(saving_module.Saving, "_commit", locked)
    saved(tmp_path)
    assert refused
    assert_only(tmp_path)


def test_a_failed_save_lets_others_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, seed=1)
    with monkeypatch.context() as context:
        context.setattr(os, "fsync", _no_room)
        with pytest.raises(CheckpointError, match="No space left"):
            saved(tmp_path, seed=2)
    _acquired(tmp_path).release()
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


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(RuntimeWarning, match="has no locks; make sure that only one run saves into this folder"):
        saved(tmp_path)
    assert_only(tmp_path)


@pytest.mark.parametrize("exists", [True, False])
def test_a_lock_elsewhere_is_refused(tmp_path: Path, exists: bool) -> None:
    """A lock that is a link to somewhere else: the file there is neither emptied nor made."""
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir()
    (folder / LOCK).symlink_to(victim)
    if exists:
        victim.write_text("precious")
    with pytest.raises(CheckpointError, match=f"{LOCK}: cannot be locked: .*; choose another path"):
        saved(folder)
    assert victim.exists() == exists
    assert not exists or victim.read_text() == "precious"


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(CheckpointError, match=f"{LOCK}: cannot be locked"):
        saved(tmp_path)
