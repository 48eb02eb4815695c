"""Faults while a checkpoint is saved: the old one stays, and errors say what happened."""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from checkpoint_folder import (
    assert_holds,
    assert_only,
    flip,
    save,
    saved,
    the_data_file,
    values_of,
)
from shardopt.checkpoint import data_file, folder_lock
from shardopt.checkpoint.chunks import Chunk, Chunks
from shardopt.checkpoint.folder_lock import LOCK_NAME
from shardopt.checkpoint.index import INDEX_NAME, load_index
from shardopt.checkpoint.storage import CheckpointError, PortableReader, PortableWriter, plain_errors
from test_checkpoint_faults import _write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
    "rename": lambda monkeypatch: monkeypatch.setattr(Path, "replace", lambda *args: _raise(FULL)),
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
        context.setattr(dcp.DefaultSavePlanner, "lookup_object", lambda *args: _raise(error))
        expected = CheckpointError if isinstance(error, Exception) else KeyboardInterrupt
        with pytest.raises(expected):
            saved(tmp_path, seed=2)
    assert_only(tmp_path, seed=1)


def test_the_commit_is_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it, all data are on the disk and the old checkpoint is whole; after it, the new one."""
    saved(tmp_path, seed=1)
    replace, synced = Path.replace, []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))

    def checked(source: Path, target: Path) -> Path:
        data = {path.stat().st_ino for path in tmp_path.glob("*.bin")} - {the_data_file(tmp_path).stat().st_ino}
        assert data
        assert data | {source.stat().st_ino} <= set(synced)
        assert_holds(tmp_path, seed=1)
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", checked)
    saved(tmp_path, seed=2)
    assert_only(tmp_path, seed=2)


def test_strays(tmp_path: Path) -> None:
    """Left by saves that died. Only what has our names is removed, and nothing that may be in use."""
    saved(tmp_path)
    strays = ["0123456789abcdef-0.bin", "0123456789abcdef-17.bin", f"{INDEX_NAME}.0123456789abcdef"]
    others = ["notes.txt", "0123456789abcdef.bin", f"{INDEX_NAME}.backup"]
    for name in [*strays, *others]:
        _write(tmp_path, name, "text")
    saved(tmp_path, seed=1)
    assert sorted(os.listdir(tmp_path)) == sorted([*load_index(tmp_path).files, INDEX_NAME, LOCK_NAME, *others])
    for name in others:
        (tmp_path / name).unlink()
    assert_only(tmp_path, seed=1)

    data = the_data_file(tmp_path)
    index = (tmp_path / INDEX_NAME).read_bytes()
    flip(tmp_path / INDEX_NAME, 100)  # what it had is not known now, but may be again
    with pytest.raises(CheckpointError):
        save(tmp_path, {"first": 1})
    writer = PortableWriter(tmp_path, {})
    writer.prepare_global_plan([])
    writer.discard()
    assert data.exists()
    (tmp_path / INDEX_NAME).write_bytes(index)
    assert_only(tmp_path, seed=1)
    flip(tmp_path / INDEX_NAME, 100)
    saved(tmp_path, seed=2)
    assert_only(tmp_path, seed=2)


def test_strays_make_room_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    _write(tmp_path, "0123456789abcdef-0.bin", "text")
    _no_room(monkeypatch)
    with pytest.raises(CheckpointError, match="No space left"):
        saved(tmp_path, seed=1)
    assert_only(tmp_path)


@pytest.mark.parametrize("of", ["index", "data"])
@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_files_elsewhere_are_not_read(tmp_path: Path, of: str, kind: str) -> None:
    """Not even where what a link leads to is what was saved."""
    folder = tmp_path / "folder"
    saved(folder)
    path = folder / INDEX_NAME if of == "index" else the_data_file(folder)
    path.rename(tmp_path / path.name)
    if kind == "link":
        path.symlink_to(tmp_path / path.name)
    else:
        os.mkfifo(path)
    got = "a symbolic link, expected a file in the folder itself" if kind == "link" else "something else, expected a"
    with pytest.raises(CheckpointError, match=f"{path}: cannot be .*got {got}"):
        assert_holds(folder)
    path.unlink()
    (tmp_path / path.name).rename(path)
    assert_only(folder)


def test_a_link_to_the_folder_is_followed(tmp_path: Path) -> None:
    saved(tmp_path / "folder")
    (tmp_path / "link").symlink_to("folder")
    assert_only(tmp_path / "link")
    saved(tmp_path / "link", seed=1)
    assert_only(tmp_path / "folder", seed=1)


def test_a_folder_that_cannot_be_read_after_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save's own error is told, and the lock is given back."""
    saved(tmp_path)

    def commit(writer: PortableWriter, text: bytes) -> None:
        monkeypatch.setattr(Path, "exists", stale)
        monkeypatch.setattr(os, "open", stale)
        raise CheckpointError("the first error")

    def stale(*args: Any, **kwargs: Any) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(PortableWriter, "_commit", commit)
    with pytest.raises(CheckpointError, match="the first error") as caught:
        saved(tmp_path, seed=1)
    monkeypatch.undo()
    monkeypatch.setattr(folder_lock, "_PATIENCE", 0.2)
    saved(tmp_path, seed=1)
    assert_only(tmp_path, seed=1)
    assert caught.tb  # the error keeps the writer, whose end would give the lock back, too


def test_what_fails_after_an_error_does_not_hide_it() -> None:
    with pytest.raises(ValueError, match="the first"), plain_errors(partial(int, "no number")):
        raise ValueError("the first")


def test_a_stray_that_stays_is_no_error(tmp_path: Path) -> None:
    stray = tmp_path / "0123456789abcdef-0.bin"
    stray.mkdir()  # cannot be removed as a file
    saved(tmp_path)
    stray.rmdir()
    assert_only(tmp_path)


def test_discard_keeps_what_was_committed(tmp_path: Path) -> None:
    writer = PortableWriter(tmp_path, {"seed": 0})
    tensors = {"first": values_of((8, 16), torch.float32), "second": values_of((8, 4), torch.uint8)}
    writer.discard()
    dcp.save(tensors, storage_writer=writer)
    writer.discard()
    assert_only(tmp_path)


def test_data_of_another_save_that_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without locks, where a second save removes the first one's data."""
    saved(tmp_path, seed=1)
    finish, old = PortableWriter.finish, the_data_file(tmp_path)

    def late(writer: PortableWriter, **kwargs: Any) -> None:
        for path in set(tmp_path.glob("*.bin")) - {old}:
            path.unlink()
        finish(writer, **kwargs)

    monkeypatch.setattr(PortableWriter, "finish", late)
    with pytest.raises(CheckpointError, match=r"cannot be found .* left alone by other saves"):
        saved(tmp_path, seed=3)
    assert_only(tmp_path, seed=1)


def test_saving_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="TypeError: got lr, which is no tensor") as caught:
        save(tmp_path, {"lr": 1.0})
    assert isinstance(caught.value.__cause__, CheckpointException)
    half = Chunks((4, 2), torch.float32, [Chunk((0, 0), torch.zeros(2, 2))])
    with pytest.raises(CheckpointError, match=r"got chunks of half to save that do not fill its shape \(4, 2\)"):
        save(tmp_path, {"half": half})
    twice = [Chunk((0, 0), torch.zeros(3, 2)), Chunk((2, 0), torch.zeros(2, 2))]
    with pytest.raises(CheckpointError, match="ValueError: Failed to validate global plan"):
        save(tmp_path, {"twice": Chunks((4, 2), torch.float32, twice)})
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot make this folder"):
        save(tmp_path / "file" / "folder", {"tensor": torch.zeros(2)})
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason="this version of PyTorch's save takes no use_collectives",
)
def test_saving_without_collectives(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="got use_collectives=False"):
        dcp.save({"a": torch.zeros(2)}, storage_writer=PortableWriter(tmp_path, {}), use_collectives=False)
    assert os.listdir(tmp_path) == []


def test_a_data_file_is_never_overwritten(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="File exists"):
        data_file.DataFileWriter(the_data_file(tmp_path)).write()
    assert_only(tmp_path)


def test_big_endian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    for make in (partial(PortableWriter, tmp_path, {}), partial(PortableReader, tmp_path)):
        with pytest.raises(CheckpointError, match="expected a little-endian one"):
            make()


def test_plain_errors() -> None:
    failures = {3: CheckpointError("full"), 0: ValueError("other"), 1: CheckpointError("full")}
    called: list[int] = []
    with pytest.raises(CheckpointError) as caught, plain_errors(lambda: called.append(1)):
        raise CheckpointException("write", {rank: (error, None) for rank, error in failures.items()})  # type: ignore[misc]
    assert str(caught.value) == "rank 0: ValueError: other\nrank 1, 3: full"
    assert called == [1]
    with pytest.raises(ZeroDivisionError), plain_errors():
        raise ZeroDivisionError
