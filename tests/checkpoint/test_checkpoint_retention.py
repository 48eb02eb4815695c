"""``keep_last`` of saves: which checkpoints of a run stay, and that nothing else is removed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import shardopt
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.storage import LocalFolder


def save(folder: Path, step: int, keep_last: int | None = None, name: str = "step-{}") -> None:
    model = torch.nn.Linear(3, 2)
    shardopt.checkpoint.save(folder / name.format(step), model, keep_last=keep_last, step=step)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(
    ("keep_last", "left"), [(None, [1, 2, 9, 10, 11]), (5, [1, 2, 9, 10, 11]), (2, [10, 11]), (1, [11])]
)
def test_the_newest_stay(tmp_path: Path, keep_last: int | None, left: Sequence[int]) -> None:
    """By number, not by name."""
    for step in (1, 2, 9, 10):
        save(tmp_path, step)
    save(tmp_path, 11, keep_last)
    assert names(tmp_path) == sorted(f"step-{step}" for step in left)
    for step in left:
        assert shardopt.checkpoint.load(tmp_path / f"step-{step}", torch.nn.Linear(3, 2)).extra == {"step": step}


def test_what_is_no_older_checkpoint_of_the_run_stays(tmp_path: Path) -> None:
    for step in (1, 2, 30):
        save(tmp_path, step)
    save(tmp_path, 1, name="other-{}")
    save(tmp_path, 1, name="{}")
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-0" / "notes.txt").touch()
    (tmp_path / "step-5").write_text("a file")
    save(tmp_path, 7, keep_last=1)
    assert names(tmp_path) == ["1", "other-1", "step-0", "step-30", "step-5", "step-7"]
    assert names(tmp_path / "step-0") == ["notes.txt"]


def test_other_files_in_a_folder_stay(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    save(tmp_path, 2, keep_last=1)
    assert names(tmp_path / "step-1") == ["notes.txt"]


def test_links_and_others_indexes_stay(tmp_path: Path) -> None:
    """A link to an archived checkpoint, and a folder of another program with a file of the index's name."""
    save(tmp_path / "archive", 1)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step-1").symlink_to(tmp_path / "archive" / "step-1")
    (tmp_path / "runs" / "step-2").mkdir()
    (tmp_path / "runs" / "step-2" / "checkpoint.json").write_text('{"someone": "else"}')
    save(tmp_path / "runs", 3, keep_last=1)
    assert names(tmp_path / "runs") == ["step-1", "step-2", "step-3"]
    assert shardopt.checkpoint.load(tmp_path / "runs" / "step-1", torch.nn.Linear(3, 2)).extra == {"step": 1}


def test_leftovers_go_later(tmp_path: Path) -> None:
    """Data without an index, of a removal that was interrupted or a save that failed, unless a save is under way."""
    for step in (1, 2):
        save(tmp_path, step)
        (tmp_path / f"step-{step}" / "checkpoint.json").unlink()
    lock = FileLock(tmp_path / "step-2" / "checkpoint.lock")
    lock.acquire()
    save(tmp_path, 3, keep_last=5)
    lock.release()
    assert names(tmp_path) == ["step-2", "step-3"]
    save(tmp_path, 4, keep_last=5)
    assert names(tmp_path) == ["step-3", "step-4"]


def test_folders_with_a_lock_or_nothing_go(tmp_path: Path) -> None:
    """Of saves that ended before they wrote anything, unless one holds the lock."""
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}").mkdir()
    (tmp_path / "step-2" / "checkpoint.lock").touch()
    lock = FileLock(tmp_path / "step-3" / "checkpoint.lock")
    lock.acquire()
    save(tmp_path, 4, keep_last=5)
    assert names(tmp_path) == ["step-3", "step-4"]
    lock.release()
    save(tmp_path, 5, keep_last=5)
    assert names(tmp_path) == ["step-4", "step-5"]


def test_a_save_whose_folder_is_removed_as_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another run, before it holds the lock: it makes the folder again."""
    make = LocalFolder.make

    def removed(folder: LocalFolder) -> None:
        make(folder)
        with monkeypatch.context() as context:
            context.setattr(LocalFolder, "make", make)
            save(tmp_path, 2, keep_last=1)
        assert names(tmp_path) == ["step-2"]

    with monkeypatch.context() as context:
        context.setattr(LocalFolder, "make", removed)
        save(tmp_path, 1)
    assert shardopt.checkpoint.load(tmp_path / "step-1", torch.nn.Linear(3, 2)).extra == {"step": 1}


def test_a_folder_that_is_removed_as_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the system's answer that there is one and a second look."""
    mkdir, calls = os.mkdir, []

    def removed(path: Path, mode: int = 0o777) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise FileExistsError(17, "File exists")
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", removed)
    save(tmp_path, 1)
    assert len(calls) > 1
    (tmp_path / "step-2").write_text("a file")
    with pytest.raises(CheckpointError, match=r"step-2: cannot make this folder: .*File exists"):
        save(tmp_path, 2)


def test_what_cannot_be_removed_keeps_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-2" / "checkpoint.lock").unlink()
    (tmp_path / "step-2" / "checkpoint.lock").mkdir()
    with pytest.warns(RuntimeWarning, match="step-2: older checkpoints cannot be removed: "):
        save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["step-2", "step-3"]


def test_a_failed_save_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    def refuse(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, 3, keep_last=1)
    assert {"step-1", "step-2"} <= set(names(tmp_path))


def test_what_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    remove = os.remove

    def refuse(path: str) -> None:
        if Path(path).parent.name == "step-1":
            raise PermissionError(13, "Permission denied")
        remove(path)

    monkeypatch.setattr(os, "remove", refuse)
    with pytest.warns(RuntimeWarning, match="older checkpoints cannot be removed: .*Permission denied"):
        save(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step-1", "step-2"]


@pytest.mark.parametrize("keep_last", [0, -1, 1.0, True])
def test_what_is_no_number_of_checkpoints(tmp_path: Path, keep_last: int) -> None:
    with pytest.raises(ValueError, match=r"got keep_last=.*, expected a positive whole number, or None to keep all"):
        save(tmp_path, 1, keep_last)
    assert names(tmp_path) == []


def test_a_folder_without_a_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a name that ends with a number, such as step-1000"):
        save(tmp_path, 1, keep_last=1, name="last")
    assert names(tmp_path) == []


def test_of_asynchronous_saves(tmp_path: Path) -> None:
    save(tmp_path, 1)
    model = torch.nn.Linear(3, 2)
    shardopt.checkpoint.async_save(tmp_path / "step-2", model, keep_last=1).result()
    assert names(tmp_path) == ["step-2"]
