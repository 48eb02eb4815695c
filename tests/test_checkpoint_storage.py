"""The portable checkpoint's storage in one process: what comes back, and what each fault says and leaves behind."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from shardopt.checkpoint import data_file
from shardopt.checkpoint.chunks import Chunk, Chunks
from shardopt.checkpoint.index import INDEX_NAME, dump_index, load_index
from shardopt.checkpoint.pipeline import computed_ahead
from shardopt.checkpoint.storage import (
    CheckpointError,
    PortableReader,
    PortableWriter,
    plain_errors,
    read_header,
    read_index,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = [torch.uint8, torch.int8, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]

#: Places to cut the dimensions of a tensor at.
Cuts = tuple[tuple[int, ...], ...]


def values_of(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits; NaNs of all kinds are among the floats."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return (numbers % 2).bool()[..., 0] if dtype == torch.bool else numbers.view(dtype)[..., 0]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def cut(tensor: Tensor, cuts: Cuts) -> Chunks:
    """Chunks that are views of a tensor's parts, cut at these places of each dimension."""
    chunks = [Chunk((), tensor)]
    for dim, places in enumerate(cuts):
        edges = [0, *places, tensor.shape[dim]]
        chunks = [
            Chunk((*offsets, start), part.narrow(dim, start, end - start))
            for offsets, part in chunks
            for start, end in itertools.pairwise(edges)
        ]
    return Chunks(tensor.shape, tensor.dtype, chunks)


def save(path: Path, tensors: dict[str, Any], header: dict[str, Any] | None = None) -> None:
    writer = PortableWriter(path, {} if header is None else header)
    with plain_errors(writer.discard):
        dcp.save(tensors, storage_writer=writer, planner=dcp.DefaultSavePlanner(flatten_state_dict=False), no_dist=True)


def load(path: Path, tensors: dict[str, Any]) -> None:
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    with plain_errors():
        dcp.load(tensors, storage_reader=PortableReader(path), planner=planner, no_dist=True)


def saved(path: Path, seed: int = 0) -> dict[str, Tensor]:
    """Saves two tensors, each in two chunks."""
    tensors = {"first": values_of((8, 16), torch.float32, seed), "second": values_of((8, 4), torch.uint8, seed)}
    save(path, {name: cut(tensor, ((4,), ())) for name, tensor in tensors.items()}, {"seed": seed})
    return tensors


def assert_holds(path: Path, seed: int = 0) -> None:
    """What :func:`saved` saved can be loaded."""
    tensors = {"first": torch.zeros(8, 16), "second": torch.zeros(8, 4, dtype=torch.uint8)}
    load(path, {name: cut(tensor, ((), ())) for name, tensor in tensors.items()})
    assert bits(tensors["first"]) == bits(values_of((8, 16), torch.float32, seed))
    assert bits(tensors["second"]) == bits(values_of((8, 4), torch.uint8, seed))
    assert read_header(path) == {"seed": seed}


def assert_only(path: Path, seed: int = 0) -> None:
    """It can, and nothing else is in the folder."""
    assert_holds(path, seed)
    assert sorted(os.listdir(path)) == sorted([*load_index(path).files, INDEX_NAME])


def the_data_file(path: Path) -> Path:
    (name,) = load_index(path).files
    return path / name


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


#: A shape, the chunks saved, the chunks loaded.
CASES: list[tuple[tuple[int, ...], Cuts, Cuts]] = [
    ((), (), ()),
    ((0,), ((),), ((),)),
    ((0, 5), ((), (2,)), ((), ())),
    ((5, 0), ((2,), ()), ((), ())),
    ((1,), ((),), ((),)),
    ((130,), ((1, 64),), ((33, 64, 65, 129),)),
    ((7, 3, 5), ((), (1,), (2, 4)), ((3,), (2,), ())),
    ((2, 3, 2, 3), ((1,), (), (), (1,)), ((), (1, 2), (), ())),
    ((33, 9), ((8, 16, 24), ()), ((11, 22), ())),
    ((97, 33), ((40,), (7, 30)), ((1, 96), (16,))),
]


def check_round_trip(path: Path, dtype: torch.dtype, cases: Sequence[tuple[tuple[int, ...], Cuts, Cuts]]) -> None:
    """Saves tensors cut in one way and loads them cut in another."""
    shapes, saved_cuts, loaded_cuts = ({str(n): case[i] for n, case in enumerate(cases)} for i in range(3))
    tensors = {name: values_of(shape, dtype, int(name)) for name, shape in shapes.items()}
    save(path, {name: cut(tensor, saved_cuts[name]) for name, tensor in tensors.items()})
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load(path, {name: cut(tensor, loaded_cuts[name]) for name, tensor in targets.items()})
    for name, stored in read_index(path).items():
        assert bits(targets[name]) == bits(tensors[name]), shapes[name]
        assert (stored.shape, stored.dtype) == (shapes[name], dtype)
        assert all(chunk.position % 64 == 0 and chunk.bytes <= data_file._MAX_BYTES for chunk in stored.chunks)
    assert set(read_index(path)) == set(shapes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    check_round_trip(tmp_path, dtype, CASES)


@pytest.mark.parametrize("elements", [1, 2, 5, 40, 1000])
def test_round_trip_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(data_file, "_MAX_BYTES", 4 * elements)
    check_round_trip(tmp_path, torch.float32, CASES if elements > 5 else CASES[:-1])


def test_views_of_any_strides(tmp_path: Path) -> None:
    tensor = values_of((6, 40), torch.float32)
    save(tmp_path, {"transposed": cut(tensor.t(), ((7,), (2,))), "plain": tensor[:, ::2]})
    transposed, plain = torch.zeros(80, 12)[::2, ::2], torch.zeros(6, 20)
    load(tmp_path, {"transposed": cut(transposed, ((11,), ())), "plain": plain})
    assert bits(transposed) == bits(tensor.t())
    assert bits(plain) == bits(tensor[:, ::2])


def test_what_stands_in_the_folder(tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    content = json.loads((tmp_path / INDEX_NAME).read_text())
    assert (content["format"], content["format_version"]) == ("shardopt", 1)
    data = the_data_file(tmp_path).read_bytes()
    assert content["files"] == {the_data_file(tmp_path).name: len(data)}
    for name, stored in content["tensors"].items():
        found = b"".join(data[chunk["position"] :][: chunk["bytes"]] for chunk in stored["chunks"])
        assert found == bits(tensors[name])


def test_header(tmp_path: Path) -> None:
    header = {"text": "a\u00e9\u2028", "numbers": [1, -2.5e-300, 2**60], "nested": {"none": None, "yes": True}}
    writer = PortableWriter(tmp_path / "new" / "folder", header)
    expected = json.loads(json.dumps(header))
    header["text"] = "changed afterwards"
    dcp.save({"tensor": torch.ones(2)}, storage_writer=writer, no_dist=True)
    assert read_header(tmp_path / "new" / "folder") == expected
    reader = PortableReader(tmp_path / "new" / "folder")
    reader.read_metadata()
    assert reader.header == expected
    with pytest.raises(TypeError, match="JSON"):
        PortableWriter(tmp_path, {"tensor": torch.ones(2)})


def test_written_is_less_than_held(tmp_path: Path) -> None:
    """The written part may begin where the held one does."""
    values = values_of((6, 4), torch.float32)
    upper = Chunks((6, 4), torch.float32, [Chunk((0, 0), values[:5])], [Chunk((0, 0), values[:2])])
    items = upper.__create_write_items__("name", upper)
    assert [upper.__get_tensor_shard__(item.index).shape for item in items] == [(2, 4)]
    (chunk,) = upper.__create_chunk_list__()
    assert chunk.sizes == (5, 4)
    whole = Chunks(
        (6, 4), torch.float32, [Chunk((0, 0), values)], [Chunk((0, 0), values[:2]), Chunk((2, 0), values[2:])]
    )
    save(tmp_path, {"name": whole})
    before = values.clone()
    values.zero_()
    load(tmp_path, {"name": whole})
    assert bits(values) == bits(before)


@pytest.mark.parametrize(
    "chunks",
    [
        [Chunk((0,), torch.zeros(2, 2))],
        [Chunk((0, 0), torch.zeros(2))],
        [Chunk((0, 3), torch.zeros(2, 2))],
        [Chunk((-1, 0), torch.zeros(2, 2))],
        [Chunk((0, 0), torch.zeros(2, 2, dtype=torch.int8))],
        [Chunk((0, 0), torch.zeros(2, 2)), Chunk((0, 0), torch.zeros(1, 1))],
    ],
)
def test_chunks_refuse(chunks: list[Chunk]) -> None:
    with pytest.raises(ValueError, match=r"got .* expected"):
        Chunks((4, 4), torch.float32, chunks)


def test_chunks_are_nothing_to_compute_with() -> None:
    chunks = Chunks((4, 4), torch.float32, [])
    assert (chunks.size(), chunks.dtype, chunks.device.type) == ((4, 4), torch.float32, "cpu")
    assert "(4, 4)" in repr(chunks)
    with pytest.raises(TypeError, match="got Chunks"):
        torch.Tensor.sum(chunks)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was unpickled")

    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        monkeypatch.setattr(module, name, refuse)
    assert_only(tmp_path)


def test_only_what_is_needed_is_read_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = saved(tmp_path)
    needed, other = read_index(tmp_path)["first"].chunks
    flip(the_data_file(tmp_path), other.position)
    read: list[int] = []
    preadv = os.preadv

    def counting(file: int, buffers: Any, position: int) -> int:
        read.append(position)
        return preadv(file, buffers, position)

    monkeypatch.setattr(os, "preadv", counting)
    target = torch.zeros(8, 16)
    parts = [Chunk((0, 0), target[:2]), Chunk((2, 3), target[2:3, 3:]), Chunk((3, 0), target[3:4])]
    load(tmp_path, {"first": Chunks((8, 16), torch.float32, parts)})
    assert read == [needed.position]
    expected = tensors["first"].clone()
    expected[2, :3] = 0
    expected[4:] = 0
    assert bits(target) == bits(expected)


def test_bytes_stay_until_the_next_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "_MAX_BYTES", 64)
    tensors = saved(tmp_path)
    chunks = read_index(tmp_path)["first"].chunks
    assert len(chunks) == 8
    with data_file.read_chunks(the_data_file(tmp_path), reversed(chunks)) as found:
        for (chunk, data), row in zip(found, tensors["first"], strict=True):
            time.sleep(0.002)  # time for those that read ahead
            assert (chunk.shape, bits(data)) == ((1, 16), bits(row))


def test_reads_and_writes_that_do_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, position: pwrite(file, data[:5], position))
    monkeypatch.setattr(os, "preadv", lambda file, data, position: preadv(file, [data[0][:7]], position))
    saved(tmp_path)
    assert_only(tmp_path)


def _newer(path: Path) -> None:
    text = (
        dump_index(load_index(path))
        .rpartition(b',\n"crc32"')[0]
        .replace(b'"format_version": 1', b'"format_version": 2')
    )
    (path / INDEX_NAME).write_bytes(text + f',\n"crc32": "{data_file.zlib.crc32(text):08x}"}}\n'.encode())


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
                data_file.read_chunks(path, [chunk]) as chunks,
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
        expected = CheckpointError if isinstance(error, Exception) else CheckpointException
        with pytest.raises(expected, match=type(error).__name__):
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
    assert sorted(os.listdir(tmp_path)) == sorted([*load_index(tmp_path).files, INDEX_NAME, *others])
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


def test_discard_keeps_what_was_committed(tmp_path: Path) -> None:
    writer = PortableWriter(tmp_path, {"seed": 0})
    tensors = {"first": values_of((8, 16), torch.float32), "second": values_of((8, 4), torch.uint8)}
    writer.discard()
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    writer.discard()
    assert_only(tmp_path)


def test_data_of_another_save_that_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when two saves into one folder overlap: the second removes the first's data, the first must not commit."""
    saved(tmp_path, seed=1)
    finish = PortableWriter.finish

    def late(writer: PortableWriter, **kwargs: Any) -> None:
        monkeypatch.setattr(PortableWriter, "finish", finish)
        saved(tmp_path, seed=2)
        finish(writer, **kwargs)

    monkeypatch.setattr(PortableWriter, "finish", late)
    with pytest.raises(CheckpointError, match=r"cannot be found .* left alone by other saves"):
        saved(tmp_path, seed=3)
    assert_only(tmp_path, seed=2)


def test_saving_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="TypeError: got lr, which is no tensor") as caught:
        save(tmp_path, {"lr": 1.0})
    assert isinstance(caught.value.__cause__, CheckpointException)
    half = Chunks((4, 2), torch.float32, [Chunk((0, 0), torch.zeros(2, 2))])
    with pytest.raises(CheckpointError, match="got 4 elements of half to save, expected 8"):
        save(tmp_path, {"half": half})
    twice = [Chunk((0, 0), torch.zeros(3, 2)), Chunk((2, 0), torch.zeros(2, 2))]
    with pytest.raises(CheckpointError, match="ValueError: Failed to validate global plan"):
        save(tmp_path, {"twice": Chunks((4, 2), torch.float32, twice)})
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot make this folder"):
        save(tmp_path / "file" / "folder", {"tensor": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="got use_collectives=False"):
        dcp.save(
            {"a": torch.zeros(2)}, storage_writer=PortableWriter(tmp_path, {}), no_dist=True, use_collectives=False
        )
    assert os.listdir(tmp_path) == ["file"]


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


def test_async_save(tmp_path: Path) -> None:
    """What was there when it was called is saved, whatever happens to the tensors then."""
    tensors = {"first": values_of((8, 16), torch.float32), "second": values_of((8, 4), torch.uint8)}
    state = {"first": cut(tensors["first"], ((3,), (5,))), "second": tensors["second"]}
    future = dcp.async_save(state, storage_writer=PortableWriter(tmp_path, {"seed": 0}), no_dist=True)
    for tensor in tensors.values():
        tensor.zero_()
    with plain_errors():
        future.result()
    assert_only(tmp_path)

    future = dcp.async_save(
        {"lr": torch.ones(2)}, storage_writer=PortableWriter(tmp_path / INDEX_NAME, {}), no_dist=True
    )
    with pytest.raises(CheckpointError, match="cannot make this folder"), plain_errors():
        future.result()
    with pytest.raises(TypeError, match="got float for lr, expected Chunks or a plain tensor"):
        dcp.async_save({"lr": 1.0}, storage_writer=PortableWriter(tmp_path, {}), no_dist=True)
    assert_only(tmp_path)


def test_staged_chunks_are_those_written() -> None:
    values = torch.arange(24.0).view(6, 4)
    chunks = Chunks((6, 4), torch.float32, [Chunk((0, 0), values)], [Chunk((0, 2), values[:, 2:])])
    staged = chunks.staged()
    values.zero_()
    (item,) = staged.__create_write_items__("name", staged)
    copy = staged.__get_tensor_shard__(item.index)
    assert (item.index.offset, copy.tolist()) == ((0, 2), [[4.0 * row + 2, 4.0 * row + 3] for row in range(6)])
    assert copy.untyped_storage().nbytes() == copy.nbytes


def test_plain_errors() -> None:
    failures = {3: CheckpointError("full"), 0: ValueError("other"), 1: CheckpointError("full")}
    called: list[int] = []
    with pytest.raises(CheckpointError) as caught, plain_errors(lambda: called.append(1)):
        raise CheckpointException("write", {rank: (error, None) for rank, error in failures.items()})  # type: ignore[misc]
    assert str(caught.value) == "rank 0: ValueError: other\nrank 1, 3: full"
    assert called == [1]
    with pytest.raises(ZeroDivisionError), plain_errors():
        raise ZeroDivisionError


def test_computed_ahead() -> None:
    """In order, a few ahead, in threads that are gone afterwards, errors of any side included."""
    taken: list[int] = []

    def jobs(count: int) -> Iterator[Callable[[], int]]:
        for number in range(count):
            taken.append(number)
            yield partial(divmod, 100, number - 50).__call__ if number == 50 else partial(int, number)

    before = threading.active_count()
    with computed_ahead(jobs(20)) as results:
        for expected in range(20):
            assert next(results) == expected
            assert len(taken) <= expected + 3
        assert list(results) == []
    assert threading.active_count() == before
    with pytest.raises(ZeroDivisionError), computed_ahead(jobs(60)) as results:
        list(results)
    with pytest.raises(KeyError), computed_ahead(jobs(20)) as results:
        raise KeyError(next(results))
    assert threading.active_count() == before
