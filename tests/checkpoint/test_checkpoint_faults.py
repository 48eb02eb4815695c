"""The portable checkpoint's storage in one process: what each fault says, and that the previous checkpoint stays."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_folder import (
    assert_only,
    cut,
    flip,
    index_of,
    load,
    save,
    saved,
    the_data_file,
)
from shardopt.checkpoint import CheckpointError, data_file
from shardopt.checkpoint.index import INDEX_NAME, StoredFile, dump_index
from shardopt.checkpoint.reading import read_index
from shardopt.checkpoint.storage import folder_at
from shardopt.checkpoint.table import StoredChunk, encoded
from shardopt.layout.partition import Cut, GridPartition, RangePartition


def _newer(path: Path) -> None:
    text = (
        dump_index(index_of(path)).rpartition(b',\n"crc32"')[0].replace(b'"format_version": 2', b'"format_version": 3')
    )
    (path / INDEX_NAME).write_bytes(text + f',\n"crc32": "{zlib.crc32(text):08x}"}}\n'.encode())


def _reach_out(path: Path) -> None:
    """An index that has its data elsewhere."""
    (path / INDEX_NAME).write_bytes(dump_index(index_of(path)._replace(token="../elsewhere")))


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
    "newer": (_newer, r"got format version 3, expected 2; load it with"),
    "data elsewhere": (_reach_out, "got content that no version of shardopt writes"),
    "truncated data": (lambda path: _truncate(the_data_file(path)), r"got \d+ bytes, expected \d+"),
    "longer data": (lambda path: the_data_file(path).open("ab").write(b"x"), r"got \d+ bytes, expected \d+"),
    "missing data": (lambda path: the_data_file(path).unlink(), "cannot be found"),
    "damaged table": (lambda path: flip(the_data_file(path), -1), "got checksum .* expected .* were damaged"),
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
    if fault != "flipped byte":
        with pytest.raises(CheckpointError, match=message):
            read_index(path)
    assert not target.any()


def _assert_refused(path: Path) -> None:
    target = torch.zeros(8, 16)
    with pytest.raises(CheckpointError, match=r"got content that no version of shardopt writes: .*; load another"):
        load(path, {"first": cut(target, ((), ()))})
    assert not target.any()


def _parts(*parts: tuple[int, tuple[int, ...], tuple[int, ...]]) -> dict[str, Any]:
    return {"parts": tuple((file, (offsets, shape)) for file, offsets, shape in parts)}


def _rule(partition: Any, start: int = 0) -> dict[str, Any]:
    return {"partition": partition, "start": start, "parts": ()}


#: Faults that an index may have about a tensor of 8 rows and 16 columns, in one file.
TENSORS: dict[str, dict[str, Any]] = {
    "beyond": _parts((0, (0, 0), (4, 16)), (0, (100000, 0), (4, 16))),
    "negative": _parts((0, (0, 0), (4, 16)), (0, (-4, 0), (4, 16))),
    "huge": _parts((0, (0, 0), (4, 16)), (0, (10**18, 0), (4, 16))),
    "more than 64 bits": _parts((0, (0, 0), (4, 16)), (0, (2**64, 0), (4, 16))),
    "no whole number": _parts((0, (0, 0), (4, 16)), (0, (4.0, 0), (4, 16))),  # type: ignore[arg-type]
    "bool": _parts((0, (0, 0), (4, 16)), (0, (4, False), (4, 16))),
    "text": _parts((0, (0, 0), (4, 16)), (0, "40", (4, 16))),  # type: ignore[arg-type]
    "overlapping": _parts((0, (0, 0), (4, 16)), (0, (0, 0), (4, 16))),
    "overlapping in part": _parts((0, (0, 0), (4, 16)), (0, (3, 0), (4, 16))),
    "transposed": _parts((0, (0, 0), (16, 4)), (0, (4, 0), (16, 4))),
    "flat": _parts((0, (0, 0), (4, 16)), (0, (4,), (64,))),
    "one is missing": _parts((0, (0, 0), (4, 16))),
    "twice": _parts((0, (0, 0), (4, 16)), (0, (4, 0), (4, 16)), (0, (0, 0), (4, 16))),
    "negative shape": _parts((0, (0, 0), (-4, -16)), (0, (4, 0), (4, 16))),
    "in a file that is not listed": _parts((1, (0, 0), (8, 16))),
    "in a negative file": _parts((-1, (0, 0), (8, 16))),
    "begins in a file that is not listed": _rule(GridPartition(), 1),
    "ends in a file that is not listed": _rule(GridPartition((Cut(0, 2, 1),))),
    "cut where there is no dimension": _rule(GridPartition((Cut(2, 1, 1),))),
    "cut into nothing": _rule(GridPartition((Cut(0, 0, 1),))),
    "cut without an end": _rule(GridPartition((Cut(0, 2**62, 1),))),
    "cut without strides": _rule(GridPartition((Cut(0, 2, 0),))),
    "ranges in a file that is not listed": _rule(RangePartition(2, 1, 0, 64, 2)),
    "ranges of nothing": _rule(RangePartition(1, 1, 0, 0, 2)),
    "ranges of more dimensions": _rule(RangePartition(1, 1, 0, 128, 3)),
    "a negative range": _rule(RangePartition(1, 1, -1, 128, 2)),
    "scales of other blocks": _rule(RangePartition(1, 1, 0, 128, 2, (16, 2))),
    "scales of no blocks": _rule(RangePartition(1, 1, 0, 128, 2, (0, 0))),
}


@pytest.mark.parametrize("change", TENSORS)
def test_an_index_with_parts_that_do_not_make_up_a_tensor(tmp_path: Path, change: str) -> None:
    saved(tmp_path)
    index = index_of(tmp_path)
    changed = index.tensors["first"]._replace(**TENSORS[change])
    text = dump_index(index._replace(tensors={**index.tensors, "first": changed}))
    (tmp_path / INDEX_NAME).write_bytes(text)
    _assert_refused(tmp_path)


def _with(first: int, **changed: Any) -> Callable[[list[StoredChunk]], list[StoredChunk]]:
    """Changes the fields of one chunk."""
    return lambda chunks: [chunk._replace(**changed) if i == first else chunk for i, chunk in enumerate(chunks)]


#: Faults that a table may have about the two chunks of a tensor of 8 rows and 16 columns.
CHUNKS: dict[str, Callable[[list[StoredChunk]], list[StoredChunk]]] = {
    "beyond": _with(1, offsets=(100000, 0)),
    "negative": _with(1, offsets=(-4, 0)),
    "huge": _with(1, offsets=(2**62, 0)),
    "overlapping": _with(1, offsets=(0, 0)),
    "overlapping in part": _with(1, offsets=(3, 0)),
    "transposed": lambda chunks: [chunk._replace(shape=chunk.shape[::-1]) for chunk in chunks],
    "one is missing": lambda chunks: chunks[:1],
    "twice": lambda chunks: [*chunks, chunks[0]],
    "larger": _with(0, shape=(5, 16)),
    "smaller": _with(0, shape=(3, 16)),
    "negative shape": _with(0, shape=(-4, -16)),
    "so large that bytes overflow": _with(0, shape=(2**31, 2**31)),
    "beyond the file": _with(1, position=2**40),
    "before the file": _with(1, position=-64),
    "the same bytes": _with(1, position=0),
    "in the table": _with(1, position=1280),
}


def _with_table(path: Path, table: Callable[[list[int], list[StoredChunk]], bytes]) -> None:
    """Gives a checkpoint of one data file another table."""
    index = index_of(path)
    (stored,) = index.files
    chunks = read_index(path)
    numbers = [number for number, name in enumerate(index.tensors) for _ in chunks[name]]
    data = the_data_file(path).read_bytes()[: stored.data]
    new = table(numbers, [chunk for name in index.tensors for chunk in chunks[name]])
    the_data_file(path).write_bytes(data + new)
    files: list[StoredFile | None] = [StoredFile(stored.data, len(new), zlib.crc32(new))]
    (path / INDEX_NAME).write_bytes(dump_index(index._replace(files=files)))


#: Bytes that are no table at all.
TABLES: dict[str, Callable[[list[int], list[StoredChunk]], bytes]] = {
    "empty": lambda numbers, chunks: b"",
    "short": lambda numbers, chunks: encoded(numbers, chunks)[:-1],
    "long": lambda numbers, chunks: encoded(numbers, chunks) + bytes(8),
    "of more chunks": lambda numbers, chunks: (10**9).to_bytes(8, "little") + encoded(numbers, chunks)[8:],
    "of more dimensions": lambda numbers, chunks: encoded(numbers, chunks)[:8] + bytes([65] * 8),
    "of tensors that are not there": lambda numbers, chunks: encoded([7] * len(numbers), chunks),
    "of no chunks": lambda numbers, chunks: encoded([], []),
}


def _of_changed_chunks(numbers: list[int], chunks: list[StoredChunk], change: str) -> bytes:
    first = CHUNKS[change](chunks[:2])
    return encoded([0] * len(first) + numbers[2:], first + chunks[2:])


@pytest.mark.parametrize("kind", [*TABLES, *CHUNKS])
def test_a_table_of_chunks_that_do_not_make_up_a_tensor(tmp_path: Path, kind: str) -> None:
    saved(tmp_path)
    _with_table(tmp_path, TABLES.get(kind) or partial(_of_changed_chunks, change=kind))
    _assert_refused(tmp_path)


def test_a_table_that_is_longer_than_memory(tmp_path: Path) -> None:
    """Nothing is allocated for what the file does not have."""
    saved(tmp_path)
    index = index_of(tmp_path)
    stored = index.files[0]
    assert stored is not None
    (tmp_path / INDEX_NAME).write_bytes(dump_index(index._replace(files=[stored._replace(table=2**55)])))
    with pytest.raises(CheckpointError, match=rf"got \d+ bytes, expected {stored.data + 2**55}"):
        load(tmp_path, {"first": cut(torch.zeros(8, 16), ((), ()))})


def test_an_index_that_leaves_a_file_out(tmp_path: Path) -> None:
    saved(tmp_path)
    index = index_of(tmp_path)
    (tmp_path / INDEX_NAME).write_bytes(dump_index(index._replace(files=[None])))
    with pytest.raises(CheckpointError, match="got content that no version of shardopt writes: a tensor in a file"):
        load(tmp_path, {"first": torch.zeros(8, 16)})


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
    for chunks in read_index(tmp_path).values():
        for chunk in chunks:
            flip(path, chunk.position + chunk.bytes - 1)
            with (
                pytest.raises(CheckpointError, match=f"the {chunk.bytes} bytes at {chunk.position}"),
                data_file.DataFiles(folder_at(tmp_path), index_of(tmp_path)) as files,
                files.chunks([(0, chunk)]) as found,
            ):
                list(found)
            flip(path, chunk.position + chunk.bytes - 1)
    assert_only(tmp_path)


def test_every_flipped_byte_of_a_table_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path)
    path = the_data_file(tmp_path)
    (stored,) = index_of(tmp_path).files
    for place in range(stored.data, stored.data + stored.table):
        flip(path, place)
        with pytest.raises(CheckpointError, match=f"the {stored.table} bytes at {stored.data}"):
            read_index(tmp_path)
        flip(path, place)
    assert_only(tmp_path)


def test_loading_what_does_not_fit(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"got first of torch.float16 and .*, expected torch.float32 and"):
        load(tmp_path, {"first": torch.zeros(8, 16, dtype=torch.float16)})
    with pytest.raises(CheckpointError, match=r"shape \(8, 8\) to load into, expected torch.float32 and \(8, 16\)"):
        load(tmp_path, {"first": torch.zeros(8, 8)})
    with pytest.raises(CheckpointError, match="got a checkpoint without third, expected it"):
        load(tmp_path, {"third": torch.zeros(8, 8)})
