"""Checkpoints at URLs: fsspec's file system in memory, and one whose operations fail for a moment or for good."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import shardopt
from checkpoint_runs import assert_loads, assert_refuses, everything, step_with, trained
from shardopt.checkpoint import CheckpointError, data_file, storage
from shardopt.checkpoint.index import INDEX_NAME


@pytest.fixture
def url() -> Iterator[str]:
    """Nothing is there at first."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://runs/step-1"
    MemoryFileSystem.store.clear()


def names(folder: str = "/runs/step-1") -> list[str]:
    """The names in a folder. The index comes last, because names of data files begin with random digits."""
    found = sorted(path.rpartition("/")[2] for path in MemoryFileSystem.store if path.startswith(folder + "/"))
    return sorted(found, key=INDEX_NAME.__eq__)


def test_save_and_load(url: str) -> None:
    """The file system has what a folder on a disk has, without a lock."""
    model, optimizer = trained()
    shardopt.checkpoint.save(url, model, optimizer, epoch=3)
    assert assert_loads(url, everything(model, optimizer)) == {"epoch": 3}
    data, index = names()
    assert (data[16:], index) == ("-0.bin", INDEX_NAME)
    assert shardopt.checkpoint.read_header(url)["optimizer"] == "AdamW8bit"


def test_a_save_replaces_the_last_one(url: str) -> None:
    model, optimizer = trained()
    shardopt.checkpoint.save(url, model, optimizer)
    before = names()
    step_with(model, optimizer, 3)
    shardopt.checkpoint.async_save(url, model, optimizer).result()
    assert len(names()) == 2
    assert set(before) & set(names()) == {INDEX_NAME}
    assert_loads(url, everything(model, optimizer))


def test_only_the_newest_stay(url: str) -> None:
    model = torch.nn.Linear(3, 2)
    for step in range(4):
        shardopt.checkpoint.save(f"memory://runs/step-{step}", model, keep_last=2)
    assert [bool(names(f"/runs/step-{step}")) for step in range(4)] == [False, False, True, True]


def test_data_that_no_save_completed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such files go a day later: before, another run may be saving them."""
    model = torch.nn.Linear(3, 2)
    for step in range(3):
        shardopt.checkpoint.save(f"memory://runs/step-{step}", model)
        MemoryFileSystem.store.pop(f"/runs/step-{step}/{INDEX_NAME}")
    MemoryFileSystem().pipe_file("/runs/step-0/0123456789abcdef-1.bin", b"another rank's, a moment ago")
    MemoryFileSystem().pipe_file("/runs/step-1/notes.txt", b"a moment ago")
    for step in range(2):
        file = MemoryFileSystem.store[f"/runs/step-{step}/{names(f'/runs/step-{step}')[-1 - step]}"]
        file.modified -= datetime.timedelta(days=1, seconds=9)
    with monkeypatch.context() as context:  # some stores do not tell
        context.setattr(MemoryFileSystem, "modified", lambda *args: 1 / 0)
        shardopt.checkpoint.save("memory://runs/step-3", model, keep_last=1)
    assert [len(names(f"/runs/step-{step}")) for step in range(4)] == [2, 2, 1, 2]
    shardopt.checkpoint.save("memory://runs/step-4", model, keep_last=1)
    assert [len(names(f"/runs/step-{step}")) for step in range(5)] == [2, 1, 1, 0, 2]
    assert names("/runs/step-1") == ["notes.txt"]


def test_names_below_no_folder(url: str) -> None:
    model = torch.nn.Linear(3, 2)
    for step in range(3):
        shardopt.checkpoint.save(f"memory://step-{step}", model, keep_last=1)
    assert [bool(names(f"/step-{step}")) for step in range(3)] == [False, False, True]


def test_where_uploads_are_not_atomic(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by sftp: the index is renamed."""
    monkeypatch.setattr(storage, "_ATOMIC_UPLOADS", frozenset())
    model, optimizer = trained()
    shardopt.checkpoint.save(url, model, optimizer)
    expected, before = everything(model, optimizer), names()
    step_with(model, optimizer, 3)
    with monkeypatch.context() as context:
        failing(context, "mv")
        with pytest.raises(CheckpointError, match="forbidden"):
            shardopt.checkpoint.save(url, model, optimizer)
    assert set(before) <= set(names())
    assert_loads(url, expected)
    shardopt.checkpoint.save(url, model, optimizer)
    assert len(names()) == 2


def test_urls_of_files_are_folders(tmp_path: Path) -> None:
    """With a lock, and a rename."""
    shardopt.checkpoint.save(f"file://{tmp_path}/step-1", torch.nn.Linear(3, 2))
    assert (tmp_path / "step-1" / "checkpoint.lock").exists()


def test_an_upload_that_fails_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    with monkeypatch.context() as context:
        context.setattr(data_file, "_with_checksum", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shardopt.checkpoint.save(url, model, optimizer)
    gc.collect()
    assert names() == []


def failing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes an operation of the file system fail."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StoreError("forbidden")

    monkeypatch.setattr(MemoryFileSystem, name, refuse)


class StoreError(Exception):
    """As the packages of stores have their own errors."""


@pytest.mark.parametrize("name", ["cat_file", "info"])
def test_a_load_that_fails_changes_nothing(url: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, optimizer = trained()
    shardopt.checkpoint.save(url, model, optimizer)
    with monkeypatch.context() as context:
        failing(context, name)
        assert_refuses(url, r"memory://runs/step-1/.*StoreError: forbidden")
    assert_loads(url, everything(model, optimizer))


@pytest.mark.parametrize("name", ["open", "pipe_file", "makedirs"])
def test_a_save_that_fails_leaves_the_last_one(url: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, optimizer = trained()
    shardopt.checkpoint.save(url, model, optimizer)
    expected, before = everything(model, optimizer), names()
    step_with(model, optimizer, 3)
    with monkeypatch.context() as context:
        failing(context, name)
        with pytest.raises(CheckpointError, match=r"memory://runs/step-1.*StoreError: forbidden"):
            shardopt.checkpoint.save(url, model, optimizer)
    assert names() == before
    assert_loads(url, expected)


def test_damage_and_what_is_not_there(url: str) -> None:
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match="there is no such folder"):
        shardopt.checkpoint.load(url, model, optimizer)
    shardopt.checkpoint.save(url, model, optimizer)
    file = MemoryFileSystem.store[f"/runs/step-1/{names()[0]}"]
    content = bytearray(file.getvalue())
    content[100] ^= 1
    MemoryFileSystem().pipe_file(f"/runs/step-1/{names()[0]}", bytes(content))
    with pytest.raises(CheckpointError, match=r"memory://runs/step-1/.*got checksum"):
        shardopt.checkpoint.load(url, model, optimizer)
    MemoryFileSystem().rm_file(f"/runs/step-1/{INDEX_NAME}")
    with pytest.raises(CheckpointError, match="saving it was never finished"):
        shardopt.checkpoint.load(url, model, optimizer)


def test_urls_that_nothing_opens() -> None:
    with pytest.raises(CheckpointError, match="nowhere://runs: cannot be opened: Protocol not known"):
        shardopt.checkpoint.save("nowhere://runs", torch.nn.Linear(3, 2))
