"""The portable checkpoint's storage in one process: what is saved is loaded, bit for bit, however it is cut."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_folder import Cuts, assert_only, bits, cut, flip, index_of, load, save, saved, the_data_file, values_of
from shardopt.checkpoint import data_file, read_header
from shardopt.checkpoint.data_file import computed_ahead
from shardopt.checkpoint.index import INDEX_NAME
from shardopt.checkpoint.items import Chunk, Chunks
from shardopt.checkpoint.ranks import Ranks
from shardopt.checkpoint.reading import read_index
from shardopt.checkpoint.saving import Saving
from shardopt.checkpoint.staging import Stager
from shardopt.checkpoint.storage import folder_at

DTYPES = [torch.uint8, torch.int8, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]

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
    for name, chunks in read_index(path).items():
        stored = index_of(path).tensors[name]
        assert bits(targets[name]) == bits(tensors[name]), shapes[name]
        assert (stored.shape, stored.dtype) == (shapes[name], dtype)
        assert all(chunk.position % 64 == 0 and chunk.bytes <= data_file._MAX_BYTES for chunk in chunks)
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
    assert (content["format"], content["format_version"]) == ("shardopt", 2)
    data = the_data_file(tmp_path).read_bytes()
    ((of_chunks, of_table, crc32),) = content["files"]
    assert the_data_file(tmp_path).name == content["token"] + "-0.bin"
    assert of_chunks + of_table == len(data)
    assert zlib.crc32(data[of_chunks:]) == crc32
    for name, chunks in read_index(tmp_path).items():
        assert content["tensors"][name]["parts"] == [[0, list(c.offsets), list(c.shape)] for c in chunks]
        assert b"".join(data[chunk.position :][: chunk.bytes] for chunk in chunks) == bits(tensors[name])


def test_header(tmp_path: Path) -> None:
    header = {"text": "a\u00e9\u2028", "numbers": [1, -2.5e-300, 2**60], "nested": {"none": None, "yes": True}}
    saving = Saving(folder_at(tmp_path / "new" / "folder"), header)
    expected = json.loads(json.dumps(header))
    header["text"] = "changed afterwards"
    saving.run({"tensor": Chunks.whole(torch.ones(2))}, Ranks())
    assert read_header(tmp_path / "new" / "folder") == expected
    with pytest.raises(TypeError, match="JSON"):
        Saving(folder_at(tmp_path), {"tensor": torch.ones(2)})


def test_written_is_less_than_held(tmp_path: Path) -> None:
    """The written part may begin where the held one does."""
    values = values_of((6, 4), torch.float32)
    upper = Chunks((6, 4), torch.float32, [((0, 0), values[:5])], [((0, 0), values[:2])])
    assert [tuple(x.shape) for x in (upper.written[0, 0], upper.held[0, 0])] == [(2, 4), (5, 4)]
    whole = Chunks((6, 4), torch.float32, [((0, 0), values)], [((0, 0), values[:2]), ((2, 0), values[2:])])
    save(tmp_path, {"name": whole})
    before = values.clone()
    values.zero_()
    load(tmp_path, {"name": whole})
    assert bits(values) == bits(before)


@pytest.mark.parametrize(
    "chunks",
    [
        [((0,), torch.zeros(2, 2))],
        [((0, 0), torch.zeros(2))],
        [((0, 3), torch.zeros(2, 2))],
        [((-1, 0), torch.zeros(2, 2))],
        [((0, 0), torch.zeros(2, 2, dtype=torch.int8))],
        [((0, 0), torch.zeros(2, 2)), ((0, 0), torch.zeros(1, 1))],
    ],
)
def test_chunks_refuse(chunks: list[Chunk]) -> None:
    with pytest.raises(ValueError, match=r"got .* expected"):
        Chunks((4, 4), torch.float32, chunks)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was unpickled")

    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        monkeypatch.setattr(module, name, refuse)
    assert_only(tmp_path)


def test_only_what_is_needed_is_read_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = saved(tmp_path)
    needed, other = read_index(tmp_path)["first"]
    table = index_of(tmp_path).files[0].data
    flip(the_data_file(tmp_path), other.position)
    read: list[int] = []
    preadv = os.preadv

    def counting(file: int, buffers: Any, position: int) -> int:
        read.append(position)
        return preadv(file, buffers, position)

    monkeypatch.setattr(os, "preadv", counting)
    target = torch.zeros(8, 16)
    parts = [((0, 0), target[:2]), ((2, 3), target[2:3, 3:]), ((3, 0), target[3:4])]
    load(tmp_path, {"first": Chunks((8, 16), torch.float32, parts)})
    assert read == [table, needed.position]
    expected = tensors["first"].clone()
    expected[2, :3] = 0
    expected[4:] = 0
    assert bits(target) == bits(expected)


def test_bytes_stay_until_the_next_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "_MAX_BYTES", 64)
    tensors = saved(tmp_path)
    chunks = read_index(tmp_path)["first"]
    assert len(chunks) == 8
    wanted = [(0, chunk) for chunk in reversed(chunks)]
    with data_file.DataFiles(folder_at(tmp_path), index_of(tmp_path)) as files, files.chunks(wanted) as found:
        for (_, chunk, data), row in zip(found, tensors["first"], strict=True):
            time.sleep(0.002)  # time for those that read ahead
            assert (chunk.shape, bits(data)) == ((1, 16), bits(row))


def test_reads_and_writes_that_do_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, position: pwrite(file, data[:5], position))
    monkeypatch.setattr(os, "preadv", lambda file, data, position: preadv(file, [data[0][:7]], position))
    saved(tmp_path)
    assert_only(tmp_path)


def test_staged_chunks_are_those_written() -> None:
    values = torch.arange(24.0).view(6, 4)
    chunks = Chunks((6, 4), torch.float32, [((0, 0), values)], [((0, 2), values[:, 2:])])
    staged = Stager().stage({"name": chunks})["name"]
    values.zero_()
    ((offsets, copy),) = staged.written.items()
    assert (offsets, copy.tolist()) == ((0, 2), [[4.0 * row + 2, 4.0 * row + 3] for row in range(6)])
    assert copy.untyped_storage().nbytes() == 64  # of the 48 that are written and no more


def test_a_stager_uses_its_memory_again() -> None:
    """Also for other tensors that need no more; for others it takes more."""
    of = {"a": values_of((3, 5), torch.bfloat16), "b": values_of((), torch.float64), "c": values_of((0, 4), torch.bool)}
    others = {"x": values_of((7,), torch.uint8), "y": values_of((2, 2), torch.int64)}
    stager = Stager()

    def staged(tensors: dict[str, torch.Tensor]) -> set[int]:
        """The addresses of the memory with the copies."""
        held = {name: Chunks.whole(tensor) for name, tensor in tensors.items()}
        copies = {name: chunks.written.values() for name, chunks in stager.stage(held).items()}
        assert {k: [bits(x) for x in v] for k, v in copies.items()} == {
            k: [bits(x)] if x.numel() else [] for k, x in tensors.items()
        }
        return {x.untyped_storage().data_ptr() for v in copies.values() for x in v}

    first = staged(of)
    assert len(first) == 1
    assert staged(others) == staged(of) == first
    assert len(staged({**of, **others})) == 1


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


def test_files_of_several_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions beyond 32 bits: the file begins with a hole."""
    placed = data_file.placed

    def late(*args: Any) -> Iterator[Any]:
        for number, chunk, data in placed(*args):
            yield number, chunk._replace(position=chunk.position + (5 << 30)), data

    monkeypatch.setattr(data_file, "placed", late)
    saved(tmp_path)
    assert all(chunk.position >= 5 << 30 for chunks in read_index(tmp_path).values() for chunk in chunks)
    assert_only(tmp_path)
