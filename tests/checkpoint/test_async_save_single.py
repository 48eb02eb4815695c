"""async_save in one process: it is of the moment, in memory of its own, and tells its errors."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import shardopt
from checkpoint_runs import assert_loads, everything, step_with, trained
from shardopt.checkpoint import CheckpointError


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves write data once this is set."""
    event, pwrite = threading.Event(), os.pwrite

    def write_later(*args: Any) -> int:
        event.wait()
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", write_later)
    return event


def test_async_save_is_of_the_moment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained()
    expected = everything(model, optimizer)
    saving = shardopt.checkpoint.async_save(tmp_path, model, optimizer)
    step_with(model, optimizer, 50)
    saving.result()
    assert_loads(tmp_path, expected)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot make this folder"):
        shardopt.checkpoint.async_save(tmp_path / "file", model, optimizer).result()
    assert [text[:19] for text in caplog.messages] == ["async_save failed: "]


def memory_of(saving: Future[None]) -> int:
    """The address of the memory that has an asynchronous save's copies."""
    return saving.stager._buffer.data_ptr()


@pytest.mark.parametrize("on_disk", [False, True])
def test_async_save_takes_the_memory_of_the_last_one(tmp_path: Path, may_write: threading.Event, on_disk: bool) -> None:
    """As long as its future is there, and not before it is complete. On a disk, in files without names."""
    model, optimizer = trained()
    expected, saves = [], []
    staging = tmp_path / "staging" if on_disk else None
    (tmp_path / "staging").mkdir()

    def save(number: int) -> Future[None]:
        return shardopt.checkpoint.async_save(tmp_path / str(number), model, optimizer, staging_dir=staging)

    for number in range(2):
        expected.append(everything(model, optimizer))
        saves.append(save(number))
        step_with(model, optimizer, number)
    assert not saves[0].cancel()
    assert not saves[0].done()
    may_write.set()
    for saving in saves:
        saving.result()
    assert memory_of(saves[0]) != memory_of(saves[1])
    expected.append(everything(model, optimizer))
    saves.append(save(2))
    assert memory_of(saves[2]) == memory_of(saves[1])
    saves[2].result()
    for number in range(3):
        assert_loads(tmp_path / str(number), expected[number])
    assert os.listdir(tmp_path / "staging") == []
    memory = weakref.ref(saves[2].stager)
    del saving
    saves.clear()
    gc.collect()
    assert memory() is None


def test_no_room_for_copies_on_a_local_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match=r"nowhere: cannot stage \d+ bytes: No such file"):
        shardopt.checkpoint.async_save(tmp_path / "1", model, optimizer, staging_dir=tmp_path / "nowhere")

    def refuse(*args: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(CheckpointError, match=r"cannot stage \d+ bytes: No space left .*; make room or choose another"):
        shardopt.checkpoint.async_save(tmp_path / "1", model, optimizer, staging_dir=tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_program_that_ends_meanwhile_completes_the_save(tmp_path: Path) -> None:
    program = (
        "import sys, torch, shardopt\n"
        "model = torch.nn.Linear(1000, 3000)\n"
        "saving = shardopt.checkpoint.async_save(sys.argv[1], model, number=3)\n"
        "assert not saving.done()\n"
    )
    command = [sys.executable, "-c", program, tmp_path / "saved"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert shardopt.checkpoint.load(tmp_path / "saved", torch.nn.Linear(1000, 3000)).extra == {"number": 3}
