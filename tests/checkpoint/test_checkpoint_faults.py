"""The portable checkpoint's storage in one process: what each fault says, and that the previous checkpoint stays."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_folder import (
    assert_only,
    cut,
    flip,
    load,
    save,
    saved,
    the_data_file,
)
from shardopt.checkpoint import data_file
from shardopt.checkpoint.index import INDEX_NAME, StoredChunk, dump_index, load_index
from shardopt.checkpoint.storage import CheckpointError, read_index

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _newer(path: Path) -> None:
    text = (
        dump_index(load_index(path))
        .rpartition(b',\n"crc32"')[0]
        .replace(b'"format_version": 1', b'"format_version": 2')
    )
    (path / INDEX_NAME).write_bytes(text + f',\n"crc32": "{zlib.crc32(text):08x}"}}\n'.encode())


def _reach_out(path: Path) -> None:
    """An index that has its data elsewhere."""
    index = load_index(path)
    (name,) = index.files
    chunks = [chunk._replace(file="../elsewhere") for chunk in index.tensors["first"].chunks]
    tensors = {**index.tensors, "first": index.tensors["first"]._replace(chunks=chunks)}
    files = {name: index.files[name], "../elsewhere": index.files[name]}
    (path / INDEX_NAME).write_bytes(dump_index(index._replace(files=files, tensors=tensors)))


def _write(path: Path, name: str, text: str) -> None:
    (path / name).write_text(text)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda path: path.rename(path.with_name("moved")), "there is no such folder"),
    "a file": (lambda path: (path.rename(path.with_name("moved")), path.touch()), "there is no such folder"),
    "empty folder": (lambda path: [entry.unlink() for entry in path.iterdir()], f"there is no {INDEX_NAME} in it"),
    "never finished": (lambda path: (path / INDEX_NAME).unlink(), "saving it was never finished"),
    "unreadable": (lambda path: ((path / INDEX_NAME).unlink(), (path / INDEX_NAME).mkdir()), "cannot be read"),
    "another kind": (lambda path: _write(path, INDEX_NAME, '{"weights": []}\n'), "a file of another kind"),
    "another's text": (lambda path: _write(path, INDEX_NAME, "PK\x03\x04"), "a file of another kind"),
    "truncated index": (lambda path: _truncate(path / INDEX_NAME), "it was damaged after it was saved"),
    "newer": (_newer, r"got format version 2, expected 1; install"),
    "data elsewhere": (_reach_out, "got content that no version of shardopt writes"),
    "truncated data": (lambda path: _truncate(the_data_file(path)), r"got \d+ bytes, expected \d+"),
    "longer data": (lambda path: the_data_file(path).open("ab").write(b"x"), r"got \d+ bytes, expected \d+"),
    "missing data": (lambda path: the_data_file(path).unlink(), "cannot be found"),
    "flipped byte": (lambda path: flip(the_data_file(path), 0), "got checksum .* expected .* were damaged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "checkpoint"
    saved(path)
    make, message = FAULTS[fault]
    make(path)
    target = torch.zeros(8, 16)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path, {"first": cut(target, ((), ()))})
    assert str(path) in str(caught.value)
    if "data" not in fault and fault != "flipped byte":
        with pytest.raises(CheckpointError, match=message):
            read_index(path)
    assert not target.any()


def _with(first: int, **changed: Any) -> Callable[[list[StoredChunk]], list[StoredChunk]]:
    """Changes the fields of one chunk."""
    return lambda chunks: [chunk._replace(**changed) if i == first else chunk for i, chunk in enumerate(chunks)]


#: What the two chunks of a tensor of 8 rows and 16 columns must not be.
CHUNKS: dict[str, Callable[[list[StoredChunk]], list[StoredChunk]]] = {
    "beyond": _with(1, offsets=(100000, 0)),
    "negative": _with(1, offsets=(-4, 0)),
    "huge": _with(1, offsets=(10**18, 0)),
    "more than 64 bits": _with(1, offsets=(2**64, 0)),
    "no whole number": _with(1, offsets=(4.0, 0)),
    "bool": _with(1, offsets=(4, False)),
    "text": _with(1, offsets="40"),
    "overlapping": _with(1, offsets=(0, 0)),
    "overlapping in part": _with(1, offsets=(3, 0)),
    "transposed": lambda chunks: [chunk._replace(shape=chunk.shape[::-1]) for chunk in chunks],
    "flat": _with(1, offsets=(4,), shape=(64,)),
    "one is missing": lambda chunks: chunks[:1],
    "twice": lambda chunks: [*chunks, chunks[0]],
    "of another length": _with(0, bytes=255),
    "negative bytes": _with(0, shape=(-4, -16)),
    "beyond the file": _with(1, position=2**40),
    "the same bytes": _with(1, position=0),
    "in a file that is not listed": _with(0, file="0123456789abcdef-7.bin"),
}


@pytest.mark.parametrize("change", CHUNKS)
def test_chunks_that_do_not_make_up_a_tensor(tmp_path: Path, change: str) -> None:
    saved(tmp_path)
    index = load_index(tmp_path)
    tensor = index.tensors["first"]
    changed = tensor._replace(chunks=CHUNKS[change](tensor.chunks))
    text = dump_index(index._replace(tensors={**index.tensors, "first": changed}))
    (tmp_path / INDEX_NAME).write_bytes(text)
    target = torch.zeros(8, 16)
    with pytest.raises(CheckpointError, match=r"got content that no version of shardopt writes: .*; load another"):
        load(tmp_path, {"first": cut(target, ((), ()))})
    assert not target.any()


@pytest.mark.parametrize("text", ["[" * 100000, "\ufeff{}", '{"format": "shardopt"', "\x00", '{"format": "shardopt"}'])
def test_an_index_that_is_no_json_of_ours(tmp_path: Path, text: str) -> None:
    content = text.encode()
    last_line = f',\n"crc32": "{zlib.crc32(content):08x}"}}\n'.encode()
    (tmp_path / INDEX_NAME).write_bytes(content + last_line)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))) as caught:
        read_index(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_index_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX_NAME)
    with pytest.raises(CheckpointError, match="expected a regular file"):
        read_index(tmp_path)


def test_new_folders_outlast_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder that is made is in one that was synchronized afterwards."""
    synced, fsync = set(), os.fsync

    def noted(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    saved(tmp_path / "new" / "er" / "folder")
    for folder in (tmp_path, tmp_path / "new", tmp_path / "new" / "er", tmp_path / "new" / "er" / "folder"):
        assert folder.stat().st_ino in synced, folder


def test_every_flipped_byte_of_the_index_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.zeros(1)})
    path = tmp_path / INDEX_NAME
    content = path.read_bytes()
    for place in range(len(content)):
        flip(path, place)
        with pytest.raises(CheckpointError):
            read_index(tmp_path)
        path.write_bytes(content)
    assert list(read_index(tmp_path)) == ["a"]


def test_every_flipped_byte_of_the_data_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path)
    path = the_data_file(tmp_path)
    for stored in read_index(tmp_path).values():
        for chunk in stored.chunks:
            flip(path, chunk.position + chunk.bytes - 1)
            with (
                pytest.raises(CheckpointError, match=f"the {chunk.bytes} bytes at {chunk.position}"),
                data_file.opened([path]) as files,
                data_file.read_chunks(next(files), [chunk]) as chunks,
            ):
                list(chunks)
            flip(path, chunk.position + chunk.bytes - 1)
    assert_only(tmp_path)


def test_loading_what_does_not_fit(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"got first of torch.float16 to load into, expected torch.float32"):
        load(tmp_path, {"first": torch.zeros(8, 16, dtype=torch.float16)})
    with pytest.raises(CheckpointError, match="ValueError: Size mismatch"):
        load(tmp_path, {"first": torch.zeros(8, 8)})
    with pytest.raises(CheckpointError, match="Missing key in checkpoint state_dict: third"):
        load(tmp_path, {"third": torch.zeros(8, 8)})
