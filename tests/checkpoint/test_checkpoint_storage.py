"""Files in a checkpoint's folder or at its URL, and which checkpoints of a run stay there.

Object stores are fsspec's file system in memory.
"""

from __future__ import annotations

import gc
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import shardopt
from attack.index_file import INDEX, read_index, read_saved
from checkpoint_folder import LOCK, bits, flip, the_data_file, values_of
from checkpoint_runs import assert_loads, assert_refuses, everything, step_with, trained
from shardopt.checkpoint import CheckpointError

DTYPES = [torch.uint8, torch.int8, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
#: Larger than a chunk may be, and cut along one dimension or another; scalars, and tensors without elements.
SHAPES = [(9 << 20,), (2, 9 << 20), (1, 2, 9000, 1001), (), (1,), (0,), (0, 5), (5, 0), (130, 3)]


def test_any_shape_dtype_and_strides(tmp_path: Path) -> None:
    """Chunks have at most 8 MiB, and begin at multiples of 64 bytes."""
    extra: dict[str, Any] = {str(n): values_of(shape, torch.uint8, n) for n, shape in enumerate(SHAPES)}
    extra |= {str(dtype): values_of((7, 40), dtype) for dtype in DTYPES}
    extra |= {"transposed": extra["torch.float32"].t(), "strided": extra["torch.float16"][::3, 1::2]}
    shardopt.checkpoint.save(tmp_path, nn.Identity(), **extra)
    found = shardopt.checkpoint.load(tmp_path, nn.Identity()).extra
    for key, tensor in extra.items():
        assert (found[key].dtype, found[key].shape, bits(found[key])) == (tensor.dtype, tensor.shape, bits(tensor))
    ((*chunks,),) = read_saved(tmp_path).tables
    assert max(torch.Size(chunk.shape).numel() for chunk in chunks) <= 8 << 20
    assert all(chunk.position % 64 == 0 for chunk in chunks)


def test_only_what_is_needed_is_read_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model alone, not the optimizer's state, which may be damaged."""
    shardopt.checkpoint.save(tmp_path, *trained())
    (stored,), (chunks,) = read_index(tmp_path)["files"], read_saved(tmp_path).tables
    names = sorted(read_index(tmp_path)["tensors"])
    for chunk in chunks:
        if names[chunk.tensor].startswith("optimizer."):
            flip(the_data_file(tmp_path), chunk.position)
    read, preadv = [], os.preadv

    def noted(file: int, buffers: Any, position: int) -> int:
        read.append(position)
        return preadv(file, buffers, position)

    monkeypatch.setattr(os, "preadv", noted)
    shardopt.checkpoint.load(tmp_path, trained(seed=7)[0])
    assert sorted(read) == sorted(
        [stored[0], *(chunk.position for chunk in chunks if names[chunk.tensor].startswith("model."))]
    )


# --- URLs


@pytest.fixture
def url() -> Iterator[str]:
    """Nothing is there at first."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://runs/step-1"
    MemoryFileSystem.store.clear()


def objects(folder: str = "/runs/step-1") -> list[str]:
    """The names in a folder. The index comes last, because names of data files begin with random digits."""
    found = sorted(path.rpartition("/")[2] for path in MemoryFileSystem.store if path.startswith(folder + "/"))
    return sorted(found, key=INDEX.__eq__)


def test_a_save_replaces_the_last_one(url: str) -> None:
    """The file system has what a folder on a disk has, without a lock."""
    model, optimizer = trained()
    shardopt.checkpoint.save(url, model, optimizer, epoch=3)
    before = objects()
    assert (before[0][16:], before[1:]) == ("-0.bin", [INDEX])
    assert shardopt.checkpoint.read_header(url)["optimizer"] == "AdamW8bit"
    assert assert_loads(url, everything(model, optimizer)) == {"epoch": 3}
    step_with(model, optimizer, 3)
    shardopt.checkpoint.async_save(url, model, optimizer).result()
    assert len(objects()) == 2
    assert set(before) & set(objects()) == {INDEX}
    assert_loads(url, everything(model, optimizer))


@pytest.mark.parametrize("root", ["/runs/step-", "/step-"])
def test_only_the_newest_objects_stay(url: str, root: str) -> None:
    """Strays stay, since stores have no locks: another run may be saving them."""

    def save(step: int, keep_last: int | None = None) -> None:
        shardopt.checkpoint.save(f"memory:/{root}{step}", nn.Linear(3, 2), keep_last=keep_last)

    for step in range(4):
        save(step, keep_last=2)
    assert [len(objects(f"{root}{step}")) for step in range(4)] == [0, 0, 2, 2]
    MemoryFileSystem.store.pop(f"{root}2/{INDEX}")
    MemoryFileSystem().pipe_file(f"{root}3/notes.txt", b"notes")
    save(4, keep_last=1)
    assert [len(objects(f"{root}{step}")) for step in range(2, 5)] == [1, 1, 2]
    assert objects(f"{root}3") == ["notes.txt"]


class StoreError(Exception):
    """As the packages of stores have their own errors."""


def failing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes an operation of the file system fail."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StoreError("forbidden")

    monkeypatch.setattr(MemoryFileSystem, name, refuse)


@pytest.mark.parametrize("name", ["cat_file", "info"])
def test_a_load_that_fails_changes_nothing(url: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, optimizer = trained()
    shardopt.checkpoint.save(url, model, optimizer)
    with monkeypatch.context() as context:
        failing(context, name)
        assert_refuses(url, r"memory://runs/step-1/.*StoreError: forbidden")
    assert_loads(url, everything(model, optimizer))


@pytest.mark.parametrize("name", ["open", "pipe_file", "makedirs", "mv"])
def test_a_save_that_fails_leaves_the_last_one(url: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also in a store whose uploads are not atomic, such as sftp, where the index is renamed."""
    if name == "mv":
        monkeypatch.setattr(MemoryFileSystem, "protocol", "sftp")
    model, optimizer = trained()
    shardopt.checkpoint.save(url, model, optimizer)
    expected, before = everything(model, optimizer), objects()
    step_with(model, optimizer, 3)
    with monkeypatch.context() as context:
        failing(context, name)
        with pytest.raises(CheckpointError, match=r"memory://runs/step-1.*StoreError: forbidden"):
            shardopt.checkpoint.save(url, model, optimizer)
    assert set(before) <= set(objects())
    assert_loads(url, expected)
    shardopt.checkpoint.save(url, model, optimizer)
    assert len(objects()) == 2
    assert_loads(url, everything(model, optimizer))


@pytest.mark.parametrize("is_local", [True, False])
def test_an_error_in_a_thread_leaves_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    """That computes checksums, while data are written or uploaded. The threads end."""
    before = threading.active_count()
    with monkeypatch.context() as context:
        context.setattr(zlib, "crc32", lambda data: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shardopt.checkpoint.save(tmp_path if is_local else url, *trained())
    gc.collect()
    assert (objects(), os.listdir(tmp_path)) == ([], [LOCK] if is_local else [])
    assert threading.active_count() == before


def test_what_is_not_there(url: str) -> None:
    run = trained()
    with pytest.raises(CheckpointError, match="there is no such folder"):
        shardopt.checkpoint.load(url, *run)
    shardopt.checkpoint.save(url, *run)
    MemoryFileSystem().rm_file(f"/runs/step-1/{INDEX}")
    with pytest.raises(CheckpointError, match="saving it was never finished"):
        shardopt.checkpoint.load(url, *run)


def test_other_urls(tmp_path: Path) -> None:
    """URLs of files are folders, with a lock, and a rename; others may have no package."""
    shardopt.checkpoint.save(f"file://{tmp_path}/step-1", nn.Linear(3, 2))
    assert (tmp_path / "step-1" / LOCK).exists()
    with pytest.raises(CheckpointError, match="nowhere://runs: cannot be opened: Protocol not known"):
        shardopt.checkpoint.save("nowhere://runs", nn.Linear(3, 2))


# --- keep_last


def save(folder: Path, step: int, keep_last: int | None = None, name: str = "step-{}") -> None:
    shardopt.checkpoint.save(folder / name.format(step), nn.Linear(3, 2), keep_last=keep_last, step=step)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(("keep_last", "left"), [(None, [1, 2, 9, 10, 11]), (2, [10, 11])])
def test_the_newest_stay(tmp_path: Path, keep_last: int | None, left: Sequence[int]) -> None:
    """By number, not by name."""
    for step in (1, 2, 9, 10):
        save(tmp_path, step)
    save(tmp_path, 11, keep_last)
    assert names(tmp_path) == sorted(f"step-{step}" for step in left)
    for step in left:
        assert shardopt.checkpoint.load(tmp_path / f"step-{step}", nn.Linear(3, 2)).extra == {"step": step}
    shardopt.checkpoint.async_save(tmp_path / "step-12", nn.Linear(3, 2), keep_last=1).result()
    assert names(tmp_path) == ["step-12"]


STRAY = "0123456789abcdef-0.bin"
#: By kind of an older folder: whether it is a checkpoint of the run, files that are there (or as well), and the files
#: that stay if it goes; None if it stays.
OLDER: dict[str, tuple[bool, list[str], list[str] | None]] = {
    "whole": (True, [], []),
    "whole, notes": (True, ["notes.txt"], ["notes.txt"]),
    "data": (False, [STRAY, f"{INDEX}.0123456789abcdef"], []),
    "data, notes": (False, [STRAY, "notes.txt"], ["notes.txt"]),
    "lock": (False, [LOCK], []),
    "nothing": (False, [], []),
    "notes": (False, ["notes.txt"], None),
    "whole, damaged": (False, [], None),
    "another's": (False, [INDEX], None),
    "data, locked": (False, [STRAY], None),
    "link": (False, [], None),
}


def fill(folder: Path, kind: str) -> None:
    if kind == "link":
        save(folder.parent.parent, 1, name="archived-{}")
        folder.symlink_to(folder.parent.parent / "archived-1")
        return
    folder.mkdir()
    if "whole" in kind:
        shardopt.checkpoint.save(folder, nn.Linear(3, 2))
    for name in OLDER[kind][1]:
        (folder / name).write_text('{"someone": "else"}')
    if kind == "whole, damaged":
        flip(folder / INDEX, 50)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_only_older_checkpoints_and_what_saves_left_go(tmp_path: Path, keep_last: int) -> None:
    """Not a link to an archived one, a folder that is locked, or of another program with a file of the index's name."""
    runs = tmp_path / "runs"
    for folder in ("other-1", "1", "step-30"):
        shardopt.checkpoint.save(runs / folder, nn.Linear(3, 2))
    for step, kind in enumerate(OLDER):
        fill(runs / f"step-{step}", kind)
    (runs / "step-12").touch()
    before = {path.name: names(path) if path.is_dir() else None for path in runs.iterdir()}
    lock = FileLock(runs / f"step-{list(OLDER).index('data, locked')}" / LOCK)
    lock.acquire()
    before[Path(lock.lock_file).parent.name] = [STRAY, LOCK]
    save(runs, 20, keep_last)
    found = {path.name: names(path) if path.is_dir() else None for path in runs.iterdir()}
    assert len(found.pop("step-20") or ()) == 3
    kept = 1
    for step, (is_checkpoint, _, left) in reversed(list(enumerate(OLDER.values()))):
        kept += is_checkpoint
        if left is not None and (kept > keep_last or not is_checkpoint):
            before[f"step-{step}"] = left
    assert found == {name: files for name, files in before.items() if files != []}
    lock.release()
    save(runs, 20, keep_last)
    assert not Path(lock.lock_file).parent.exists()


def test_a_removal_that_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is, the newest is whole, older ones are whole or none, and the next save removes the rest."""
    for calls in range(12):
        for step in (1, 2):
            save(tmp_path, step)
        with monkeypatch.context() as context, suppress(KeyboardInterrupt):
            left = iter(range(calls))
            for name in ("remove", "rmdir"):
                context.setattr(os, name, partial(counted, getattr(os, name), left))
            save(tmp_path, 3, keep_last=1)
        found = {}
        for step in (1, 2, 3):
            with suppress(CheckpointError):
                found[step] = shardopt.checkpoint.load(tmp_path / f"step-{step}", nn.Linear(3, 2)).extra["step"]
        assert found == {step: step for step in found}
        assert 3 in found or len(found) == 2
        save(tmp_path, 4, keep_last=1)
        assert names(tmp_path) == ["step-4"]


def counted(function: Callable[[str], None], left: Iterator[int], path: str) -> None:
    """Calls a function, so many times; then Ctrl-C comes first."""
    if next(left, None) is None:
        raise KeyboardInterrupt
    function(path)


def test_a_folder_that_other_runs_make_and_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between system calls of our mkdir or filelock's, and before the save holds the lock: it makes it again."""
    mkdir, races = os.mkdir, iter(["gone", "removed", "gone"])

    def racing(path: Path, mode: int = 0o777) -> None:
        race = next(races, None)
        if race == "gone":
            raise FileExistsError(17, "File exists")  # the system's answer, and then there is none
        mkdir(path, mode)
        if race == "removed":
            with monkeypatch.context() as context:
                context.setattr(os, "mkdir", mkdir)
                save(tmp_path, 2, keep_last=1)
            assert names(tmp_path) == ["step-2"]

    monkeypatch.setattr(os, "mkdir", racing)
    save(tmp_path, 1)
    assert next(races, None) is None
    assert shardopt.checkpoint.load(tmp_path / "step-1", nn.Linear(3, 2)).extra == {"step": 1}
    (tmp_path / "step-3").write_text("a file")
    with pytest.raises(CheckpointError, match=r"step-3: cannot make this folder: .*File exists"):
        save(tmp_path, 3)


def test_what_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps nothing else."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    remove = os.remove

    def refuse(path: str) -> None:
        if Path(path).parent.name == "step-2":
            raise PermissionError(13, "Permission denied")
        remove(path)

    monkeypatch.setattr(os, "remove", refuse)
    with pytest.warns(RuntimeWarning, match="step-2: older checkpoints cannot be removed: .*Permission denied"):
        save(tmp_path, 4, keep_last=1)
    assert names(tmp_path) == ["step-2", "step-4"]


def test_what_is_no_number_of_checkpoints(tmp_path: Path) -> None:
    for keep_last in (0, -1, 1.0, True):
        with pytest.raises(ValueError, match=r"got keep_last=.*, expected a positive whole number, or None to keep"):
            save(tmp_path, 1, keep_last)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a name that ends with a number, such as step-1000"):
        save(tmp_path, 1, keep_last=1, name="last")
    assert names(tmp_path) == []
