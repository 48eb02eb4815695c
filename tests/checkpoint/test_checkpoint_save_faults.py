"""Faults while a checkpoint is saved: the old one stays, and errors say what happened."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_folder import (
    assert_holds,
    assert_only,
    flip,
    index_of,
    save,
    saved,
    the_data_file,
)
from shardopt.checkpoint import CheckpointError, data_file
from shardopt.checkpoint.index import INDEX_NAME
from shardopt.checkpoint.items import Chunks
from shardopt.checkpoint.ranks import Ranks
from shardopt.checkpoint.reading import read_tensors
from shardopt.checkpoint.saving import Saving
from shardopt.checkpoint.storage import LOCK_NAME, folder_at
from shardopt.layout.partition import Cut, GridPartition, Placed


def _raise(error: BaseException) -> Any:
    raise error


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes some bytes, then no more."""
    pwrite, calls = os.pwrite, iter(range(1000))
    monkeypatch.setattr(os, "pwrite", lambda *args: pwrite(*args) if next(calls) < 2 else _raise(FULL), raising=True)


def _no_sync(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Fails when a file of this kind of name goes to the disk."""
    fsync = os.fsync

    def refusing(file: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{file}").rpartition("/")[2]:
            raise FULL
        fsync(file)

    monkeypatch.setattr(os, "fsync", refusing)


FAILURES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "data": _no_room,
    "data sync": lambda monkeypatch: _no_sync(monkeypatch, ".bin"),
    "index": lambda monkeypatch: _no_sync(monkeypatch, INDEX_NAME),
    "rename": lambda monkeypatch: monkeypatch.setattr(os, "replace", lambda *args: _raise(FULL)),
}


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are read from /proc")
@pytest.mark.parametrize("failure", FAILURES)
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    saved(tmp_path, seed=1)
    with monkeypatch.context() as context:
        FAILURES[failure](context)
        with pytest.raises(CheckpointError, match=r"cannot write \d+ bytes: No space left .* previous") as caught:
            saved(tmp_path, seed=2)
    assert str(tmp_path) in str(caught.value)
    assert_only(tmp_path, seed=1)
    saved(tmp_path, seed=2)
    assert_only(tmp_path, seed=2)


@pytest.mark.parametrize("error", [ValueError("no such tensor"), KeyboardInterrupt()])
def test_any_other_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    saved(tmp_path, seed=1)
    with monkeypatch.context() as context:
        context.setattr(data_file, "memoryview_of", lambda *args: _raise(error))
        with pytest.raises(type(error)):
            saved(tmp_path, seed=2)
    assert_only(tmp_path, seed=1)


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted in /proc")
@pytest.mark.parametrize("left", [0, 1])
def test_a_system_without_descriptors(tmp_path: Path, left: int) -> None:
    """Too few for a save, which changes nothing; one is enough for a load."""
    saved(tmp_path, seed=1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1  # with the one that lists them
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(left)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, limits[1]))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in free:
            os.close(descriptor)
        with pytest.raises(CheckpointError, match="Too many open files"):
            saved(tmp_path, seed=2)
        if left:
            assert_holds(tmp_path, seed=1)
        else:
            with pytest.raises(CheckpointError, match="Too many open files"):
                assert_holds(tmp_path, seed=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
    assert_holds(tmp_path, seed=1)


def test_the_commit_is_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it, all data are on the disk and the old checkpoint is whole; after it, the new one."""
    saved(tmp_path, seed=1)
    replace, synced = os.replace, []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))

    def checked(source: str, target: str) -> None:
        data = {path.stat().st_ino for path in tmp_path.glob("*.bin")} - {the_data_file(tmp_path).stat().st_ino}
        assert data
        assert data | {os.stat(source).st_ino} <= set(synced)
        assert_holds(tmp_path, seed=1)
        replace(source, target)

    monkeypatch.setattr(os, "replace", checked)
    saved(tmp_path, seed=2)
    assert_only(tmp_path, seed=2)


def test_strays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left by saves that died. Only what has our names is removed, and nothing that may be in use."""
    saved(tmp_path)
    strays = ["0123456789abcdef-0.bin", "0123456789abcdef-17.bin", f"{INDEX_NAME}.0123456789abcdef"]
    others = ["notes.txt", "0123456789abcdef.bin", f"{INDEX_NAME}.backup"]
    for name in [*strays, *others]:
        (tmp_path / name).write_text("text")
    saved(tmp_path, seed=1)
    assert sorted(os.listdir(tmp_path)) == sorted([*index_of(tmp_path).file_names, INDEX_NAME, LOCK_NAME, *others])
    for name in others:
        (tmp_path / name).unlink()
    assert_only(tmp_path, seed=1)

    data = the_data_file(tmp_path)
    index = (tmp_path / INDEX_NAME).read_bytes()
    flip(tmp_path / INDEX_NAME, 100)  # what it had is not known now, but may be again
    with pytest.raises(CheckpointError):
        save(tmp_path, {"half": Chunks((4, 2), torch.float32, [((0, 0), torch.zeros(2, 2))])})
    with monkeypatch.context() as context:
        _no_room(context)
        with pytest.raises(CheckpointError):
            saved(tmp_path, seed=2)
    assert data.exists()
    (tmp_path / INDEX_NAME).write_bytes(index)
    assert_only(tmp_path, seed=1)
    flip(tmp_path / INDEX_NAME, 100)
    saved(tmp_path, seed=2)
    assert_only(tmp_path, seed=2)


def test_strays_make_room_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    (tmp_path / "0123456789abcdef-0.bin").write_text("text")
    _no_room(monkeypatch)
    with pytest.raises(CheckpointError, match="No space left"):
        saved(tmp_path, seed=1)
    assert_only(tmp_path)


def test_a_folder_that_cannot_be_read_after_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save's own error is told, and the lock is given back."""
    saved(tmp_path)

    def commit(*args: Any) -> None:
        monkeypatch.setattr(Path, "exists", stale)
        monkeypatch.setattr(os, "open", stale)
        raise CheckpointError("the first error")

    def stale(*args: Any, **kwargs: Any) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Saving, "_commit", commit)
    with pytest.raises(CheckpointError, match="the first error") as caught:
        saved(tmp_path, seed=1)
    monkeypatch.undo()
    monkeypatch.setattr("shardopt.checkpoint.saving._PATIENCE", 0.2)
    saved(tmp_path, seed=1)
    assert_only(tmp_path, seed=1)
    assert caught.tb  # the error keeps the writer, whose end would give the lock back, too


def test_a_stray_that_stays_is_no_error(tmp_path: Path) -> None:
    stray = tmp_path / "0123456789abcdef-0.bin"
    stray.mkdir()  # cannot be removed as a file
    saved(tmp_path)
    stray.rmdir()
    assert_only(tmp_path)


def test_an_error_after_the_commit_keeps_what_was_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Saving._commit

    def late(saving: Saving, *args: Any) -> None:
        commit(saving, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Saving, "_commit", late)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path)
    assert_only(tmp_path)


def test_data_of_another_save_that_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without locks, where a second save removes the first one's data."""
    saved(tmp_path, seed=1)
    commit, old = Saving._commit, the_data_file(tmp_path)

    def late(saving: Saving, *args: Any) -> None:
        for path in set(tmp_path.glob("*.bin")) - {old}:
            path.unlink()
        commit(saving, *args)

    monkeypatch.setattr(Saving, "_commit", late)
    with pytest.raises(CheckpointError, match=r"cannot be found .* left alone by other saves"):
        saved(tmp_path, seed=3)
    assert_only(tmp_path, seed=1)


def test_saving_what_cannot_be(tmp_path: Path) -> None:
    half = Chunks((4, 2), torch.float32, [((0, 0), torch.zeros(2, 2))])
    with pytest.raises(CheckpointError, match=r"got chunks of half to save that do not fill its shape \(4, 2\)"):
        save(tmp_path, {"half": half})
    twice = [((0, 0), torch.zeros(3, 2)), ((2, 0), torch.zeros(2, 2))]
    with pytest.raises(CheckpointError, match=r"got chunks of twice to save that do not fill .* or overlap"):
        save(tmp_path, {"twice": Chunks((4, 2), torch.float32, twice)})
    other = Placed(GridPartition((Cut(0, 2, 1),)), 0)
    with pytest.raises(CheckpointError, match=r"got whole in parts .* describes its partition wrongly"):
        save(tmp_path, {"whole": Chunks((4, 2), torch.float32, [((0, 0), torch.zeros(4, 2))], placed=other)})
    with pytest.raises(CheckpointError, match="got chunks of upper to save that do not fill"):
        save(tmp_path, {"upper": Chunks((4, 2), torch.float32, [((0, 0), torch.zeros(2, 2))], placed=other)})
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot make this folder"):
        save(tmp_path / "file" / "folder", {"tensor": torch.zeros(2)})
    assert os.listdir(tmp_path) == ["file"]


def test_a_data_file_is_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    token = the_data_file(tmp_path).name.partition("-")[0]
    monkeypatch.setattr(secrets, "token_hex", lambda _: token)
    with pytest.raises(CheckpointError, match="File exists"):
        save(tmp_path, {"other": torch.zeros(3)})
    assert_only(tmp_path)
    assert_holds(tmp_path)


def test_big_endian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setattr(sys, "byteorder", "big")
    for make in (
        partial(Saving, folder_at(tmp_path), {}),
        partial(read_tensors, folder_at(tmp_path), index_of(tmp_path), {}),
    ):
        with pytest.raises(CheckpointError, match="expected a little-endian one"):
            make()


def test_one_process_needs_no_group() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.gathered(b"message") == [ranks.from_rank(0, b"message")] == [b"message"]
    with pytest.raises(KeyboardInterrupt):
        ranks.agree(lambda: _raise(KeyboardInterrupt()))
