"""Damaged and foreign folders: what a load says of each fault. The folder ``attack`` has many more, at random."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from attack.index_file import INDEX, read_index, read_saved, table_of, with_checksum, write_index
from checkpoint_folder import content_of, flip, linear_run
from shardopt.checkpoint import CheckpointError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The folder of a checkpoint."""
    shardopt.checkpoint.save(tmp_path / "checkpoint", *linear_run(0))
    return tmp_path / "checkpoint"


def refusal(path: Path) -> str:
    """The message of a load that raises and changes nothing, on one line."""
    model, optimizer = linear_run(1)
    before = content_of(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        shardopt.checkpoint.load(path, model, optimizer)
    assert content_of(model, optimizer) == before
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def loads(path: Path) -> bool:
    run = linear_run(1)
    shardopt.checkpoint.load(path, *run)
    return content_of(*run) == content_of(*linear_run(0))


def the_data_file(path: Path) -> Path:
    (found,) = path.glob("*.bin")
    return found


def _changed(path: Path, **changes: Any) -> None:
    write_index(path, {**read_index(path), **changes})


def _with_rule(path: Path, **rule: Any) -> None:
    content = read_index(path)
    content["tensors"]["model.0.weight"] = {"dtype": "float32", "shape": [66, 64], **rule}
    write_index(path, content)


def _with_table(path: Path, change: Callable[[list[Any]], bytes]) -> None:
    """Gives the data file another table."""
    saved = read_saved(path)
    data, table = the_data_file(path).read_bytes()[: saved.content["files"][0][0]], change(list(saved.tables[0]))
    the_data_file(path).write_bytes(data + table)
    _changed(path, files=[[len(data), len(table), zlib.crc32(table)]])


def _write(path: Path, text: str) -> None:
    (path / INDEX).write_text(text)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


NOT_OURS = "got content that no version of shardopt writes"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda path: path.rename(path.with_name("moved")), "there is no such folder"),
    "a file": (lambda path: (path.rename(path.with_name("moved")), path.touch()), "there is no such folder"),
    "empty folder": (lambda path: [entry.unlink() for entry in path.iterdir()], f"there is no {INDEX} in it"),
    "never finished": (lambda path: (path / INDEX).unlink(), "saving it was never finished"),
    "unreadable": (lambda path: ((path / INDEX).unlink(), (path / INDEX).mkdir()), "cannot be read"),
    "a pipe": (lambda path: ((path / INDEX).unlink(), os.mkfifo(path / INDEX)), "expected a regular file"),
    "another kind": (lambda path: _write(path, '{"weights": []}\n'), "a file of another kind"),
    "another's text": (lambda path: _write(path, "PK\x03\x04"), "a file of another kind"),
    "no end": (lambda path: (path / INDEX).write_bytes(with_checksum(b"[" * 100000)), f"{NOT_OURS}: RecursionError"),
    "no JSON": (lambda path: (path / INDEX).write_bytes(with_checksum(b"\x00")), f"{NOT_OURS}: JSONDecodeError"),
    "truncated index": (lambda path: _truncate(path / INDEX), "it was damaged after it was saved"),
    "newer": (lambda path: _changed(path, format_version=3), "got format version 3, expected 2; load it with"),
    "data elsewhere": (lambda path: _changed(path, token="../elsewhere"), f"{NOT_OURS}: token"),
    "a file left out": (
        lambda path: _changed(path, files=[None]),
        f"{NOT_OURS}: a tensor in a file that is",
    ),
    "a long table": (lambda path: _changed(path, files=[[64, 2**55, 0]]), r"got \d+ bytes, expected 36028797018964032"),
    "truncated data": (lambda path: _truncate(the_data_file(path)), r"got \d+ bytes, expected \d+"),
    "longer data": (lambda path: the_data_file(path).open("ab").write(b"x"), r"got \d+ bytes, expected \d+"),
    "missing data": (lambda path: the_data_file(path).unlink(), "cannot be found"),
    "parts that overlap": (
        lambda path: _with_rule(path, parts=[[0, [0, 0], [40, 64]], [0, [26, 0], [40, 64]]]),
        f"{NOT_OURS}: parts that do not fill",
    ),
    "a cut of no dimension": (lambda path: _with_rule(path, start=0, cuts=[[2, 1, 1]]), f"{NOT_OURS}: a cut of no dim"),
    "parts in other files": (
        lambda path: _with_rule(path, start=0, cuts=[[0, 2, 1]]),
        f"{NOT_OURS}: parts in files that are not listed",
    ),
    "a chunk twice": (lambda path: _with_table(path, lambda chunks: table_of([*chunks, chunks[0]])), NOT_OURS),
    "no chunks": (lambda path: _with_table(path, lambda chunks: table_of([])), f"{NOT_OURS}: chunks that do not fill"),
    "no table": (lambda path: _with_table(path, lambda chunks: b""), NOT_OURS),
    "a table without its end": (lambda path: _with_table(path, lambda chunks: table_of(chunks)[:-1]), NOT_OURS),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(path: Path, fault: str) -> None:
    make, message = FAULTS[fault]
    make(path)
    assert re.search(message, refusal(path))


def test_flipped_bits(tmp_path: Path) -> None:
    """In every byte of the index and of the table, and in every chunk."""
    path, model = tmp_path / "checkpoint", nn.Linear(2, 1)
    shardopt.checkpoint.save(path, model)
    (length, table, _), (chunks,) = read_index(path)["files"][0], read_saved(path).tables
    places = [(path / INDEX, place) for place in range((path / INDEX).stat().st_size)]
    places += [(the_data_file(path), length + place) for place in range(table)]
    places += [(the_data_file(path), chunk.position) for chunk in chunks]
    for file, place in places:
        flip(file, place)
        with pytest.raises(CheckpointError) as caught:
            shardopt.checkpoint.load(path, nn.Linear(2, 1))
        if file.suffix == ".bin":
            assert re.search(
                rf"got checksum \w+ of the \d+ bytes at {min(place, length)}, expected \w+", str(caught.value)
            )
        flip(file, place)
    other = nn.Linear(2, 1)
    shardopt.checkpoint.load(path, other)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_files_elsewhere_are_not_read(path: Path, kind: str) -> None:
    """Not even where what a link leads to is what was saved; but the folder may be a link."""
    for file in (path / INDEX, the_data_file(path)):
        file.rename(path.parent / file.name)
        if kind == "link":
            file.symlink_to(path.parent / file.name)
        else:
            os.mkfifo(file)
        got = "a symbolic link" if kind == "link" else "something else"
        assert re.search(f"{file}: cannot be .*got {got}, expected a regular file", refusal(path))
        file.unlink()
        (path.parent / file.name).rename(file)
    (path.parent / "link").symlink_to(path.name)
    assert loads(path.parent / "link")


def test_new_folders_outlast_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder that is made is in one that was synchronized afterwards."""
    synced, fsync = set(), os.fsync

    def noted(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    shardopt.checkpoint.save(tmp_path / "new" / "er" / "folder", nn.Linear(2, 1))
    for folder in (tmp_path, tmp_path / "new", tmp_path / "new" / "er", tmp_path / "new" / "er" / "folder"):
        assert folder.stat().st_ino in synced, folder
