"""The portable checkpoint's storage on several ranks: any chunks to any others, and ranks that fail or die."""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import checkpoint_folder
from checkpoint_folder import chunks_of, index_of
from ranks.pool import Pool, RankFailure
from shardopt.checkpoint import CheckpointError, read_header
from shardopt.checkpoint.errors import LostRanksError
from shardopt.checkpoint.index import INDEX_NAME
from shardopt.checkpoint.items import Chunk, Chunks
from shardopt.checkpoint.ranks import Ranks
from shardopt.checkpoint.storage import LOCK_NAME

#: Shapes and dtypes by name.
TENSORS = {
    "codes": ((97, 33), torch.uint8),
    "scales": ((97, 3, 2), torch.float32),
    "bias": ((70,), torch.bfloat16),
    "one": ((1,), torch.int64),
    "step": ((), torch.float32),
    "empty": ((0, 3), torch.bool),
}


def value_of(name: str, seed: int) -> Tensor:
    shape, dtype = TENSORS[name]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def _rows(tensor: Tensor) -> list[Chunk]:
    """As FSDP2 has it: some ranks may hold nothing."""
    return _part_of_dim(tensor, 0)


def _columns(tensor: Tensor) -> list[Chunk]:
    return _part_of_dim(tensor, tensor.dim() - 1)


def _part_of_dim(tensor: Tensor, dim: int) -> list[Chunk]:
    if tensor.dim() == 0:
        return [((), tensor)]
    extent = tensor.shape[dim]
    length = -(-extent // dist.get_world_size())
    start = min(dist.get_rank() * length, extent)
    offsets = [0] * tensor.dim()
    offsets[dim] = start
    return [(tuple(offsets), tensor.narrow(dim, start, min(length, extent - start)))]


def _flat(tensor: Tensor) -> list[Chunk]:
    """As FSDP1 has it: a range of the flattened matrix, which cuts rows."""
    if tensor.dim() != 2 or tensor.numel() == 0:
        return _rows(tensor)
    length = -(-tensor.numel() // dist.get_world_size())
    at, end = (min((dist.get_rank() + i) * length, tensor.numel()) for i in range(2))
    width = tensor.shape[1]
    chunks = []
    while at < end:
        row, col = divmod(at, width)
        rows, cols = ((end - at) // width, width) if not col and end - at >= width else (1, min(width - col, end - at))
        chunks.append(((row, col), tensor[row : row + rows, col : col + cols]))
        at += rows * cols
    return chunks


def _replicas(tensor: Tensor) -> list[Chunk]:
    return [((0,) * tensor.dim(), tensor)]


def _on_last(tensor: Tensor) -> list[Chunk]:
    return _replicas(tensor) if dist.get_rank() == dist.get_world_size() - 1 else []


LAYOUTS: dict[str, Callable[[Tensor], list[Chunk]]] = {
    "rows": _rows,
    "columns": _columns,
    "flat": _flat,
    "replicas": _replicas,
    "on last": _on_last,
}


def state_of(layout: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: Chunks(tensor.shape, tensor.dtype, LAYOUTS[layout](tensor)) for name, tensor in tensors.items()}


def save(path: Path, state: dict[str, Any], header: dict[str, Any]) -> None:
    checkpoint_folder.save(path, state, header)


def _save(path: Path, layout: str, seed: int) -> None:
    state = state_of(layout, {name: value_of(name, seed) for name in TENSORS})
    save(path, state, {"seed": seed, "rank": dist.get_rank()})


def _load(path: Path, layout: str, seed: int) -> None:
    """Compares what this rank is to hold, and that nothing else was written."""
    found = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in TENSORS.items()}
    expected = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in TENSORS.items()}
    checkpoint_folder.load(path, state_of(layout, found))
    for name, tensor in expected.items():
        for here, there in zip(LAYOUTS[layout](tensor), LAYOUTS[layout](value_of(name, seed)), strict=True):
            here[1].copy_(there[1])
        assert torch.equal(found[name], tensor), name


def error_of(function: Callable[..., None], *args: Any) -> str:
    """The message of a CheckpointError."""
    try:
        function(*args)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def told(messages: list[str], *failed: int) -> str:
    """The error of the ranks that failed, which the others name with the first such rank."""
    (own,) = {messages[rank] for rank in failed}
    others = {message for rank, message in enumerate(messages) if rank not in failed}
    assert len(others) == (len(failed) < len(messages))
    for message in others:
        prefix = f"got an error on rank {failed[0]} and {len(failed) - 1} others, nothing was done: "
        assert message == f"{prefix}CheckpointError: {own}"
    return own


def assert_only(ranks: Pool, path: Path, seed: int) -> None:
    """The checkpoint of this seed is in the folder, and nothing else."""
    assert read_header(path) == {"seed": seed, "rank": 0}
    assert sorted(os.listdir(path)) == sorted([*index_of(path).file_names, INDEX_NAME, LOCK_NAME])
    ranks.run(2, _load, path, "rows", seed)


@pytest.mark.parametrize("saved_on", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_to_any(ranks: Pool, tmp_path: Path, layout: str, saved_on: int) -> None:
    ranks.run(saved_on, _save, tmp_path, layout, 5)
    for name, stored in index_of(tmp_path).tensors.items():
        assert (stored.shape, stored.dtype) == TENSORS[name]
    for offset, other in enumerate(LAYOUTS, start=saved_on):
        ranks.run(offset % 4 + 1, _load, tmp_path, other, 5)


def test_replicas_are_written_once(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(4, _save, tmp_path, "replicas", 1)
    tensors = chunks_of(tmp_path)
    assert [len(chunks) for chunks in tensors.values()] == [name != "empty" for name in tensors]
    held = sum(chunk.bytes for chunks in tensors.values() for chunk in chunks)
    assert held == sum(value_of(name, 1).nbytes for name in TENSORS)
    assert held <= sum(stored.data for stored in index_of(tmp_path).files if stored) < held + 64 * len(TENSORS)


def _save_hole(path: Path) -> str:
    chunks = _rows(torch.zeros(4, 2))
    written = chunks if dist.get_rank() == 0 else []
    return error_of(save, path, {"hole": Chunks((4, 2), torch.float32, chunks, written)}, {})


def _save_two_dtypes(path: Path) -> str:
    tensor = torch.zeros(4, 2, dtype=torch.float32 if dist.get_rank() else torch.int8)
    return error_of(save, path, {"odd": Chunks((4, 2), tensor.dtype, _rows(tensor))}, {})


def _save_twice_in_one_place(path: Path) -> str:
    """Both ranks write row 1, of different rectangles."""
    rank, tensor = dist.get_rank(), torch.zeros(4, 2)
    chunk = ((rank, 0), tensor[rank : rank + 2])
    return error_of(save, path, {"twice": Chunks((4, 2), torch.float32, [chunk])}, {})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_save_hole, r"got chunks of hole to save that do not fill"),
        (_save_two_dtypes, r"got different shapes or dtypes of odd on different ranks, expected one"),
        (_save_twice_in_one_place, r"got chunks of twice to save that do not fill its shape \(4, 2\) or overlap"),
    ],
)
def test_plans_that_cannot_be(ranks: Pool, tmp_path: Path, function: Callable[[Path], str], message: str) -> None:
    assert re.search(message, told(ranks.run(2, function, tmp_path), 0, 1))
    assert os.listdir(tmp_path) == []


def _save_without_room(path: Path, layout: str, seed: int, full: int) -> str:
    """The disk of one rank is full after its first bytes."""
    with replaced_on(full, os, "pwrite", _then(1, os.pwrite, _no_room)):
        return error_of(_save, path, layout, seed)


class Death(NamedTuple):
    """A rank is gone when it comes to a call of a function of the system, after so many calls of it."""

    rank: int
    name: str
    calls: int


def _save_and_die(path: Path, layout: str, seed: int, death: Death) -> None:
    dying = _then(death.calls, getattr(os, death.name), partial(os._exit, 9))
    with replaced_on(death.rank, os, death.name, dying):
        _save(path, layout, seed)


def _no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _then(calls: int, first: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    """Works so many times."""
    count = itertools.count()

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if next(count) >= calls:
            after()
        return first(*args, **kwargs)

    return replacement


@contextmanager
def replaced_on(rank: int, owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replaces an attribute on one rank."""
    original = getattr(owner, name)
    if dist.get_rank() == rank:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@pytest.mark.parametrize("full", [0, 1])
def test_disk_full(ranks: Pool, tmp_path: Path, full: int) -> None:
    ranks.run(2, _save, tmp_path, "rows", 1)
    message = told(ranks.run(2, _save_without_room, tmp_path, "columns", 2, full), full)
    assert re.fullmatch(rf"{tmp_path}/\w+-{full}\.bin: cannot write \d+ bytes: No space .*", message)
    assert_only(ranks, tmp_path, 1)
    ranks.run(3, _save, tmp_path, "columns", 2)
    assert_only(ranks, tmp_path, 2)


@pytest.mark.parametrize(
    ("death", "committed"),
    [
        (Death(1, "pwrite", 1), False),
        (Death(0, "pwrite", 1), False),
        (Death(1, "fsync", 0), False),
        (Death(0, "fsync", 2), False),  # of the index
        (Death(0, "replace", 0), False),
        (Death(0, "remove", 0), True),
    ],
)
def test_a_rank_dies_while_saving(ranks: Pool, tmp_path: Path, death: Death, committed: bool) -> None:
    ranks.run(2, _save, tmp_path, "rows", 1)
    with pytest.raises(RankFailure, match=f"rank {death.rank} of 2 died with exit code 9"):
        ranks.run(2, _save_and_die, tmp_path, "columns", 2, death)
    assert len(os.listdir(tmp_path)) > 3
    left = 2 if committed else 1
    assert read_header(tmp_path) == {"seed": left, "rank": 0}
    ranks.run(3, _load, tmp_path, "flat", left)
    ranks.run(3, _save, tmp_path, "columns", 3)
    assert_only(ranks, tmp_path, 3)


def _load_error(path: Path) -> str:
    return error_of(_load, path, "rows", 1)


def test_what_one_rank_finds_all_say(ranks: Pool, tmp_path: Path) -> None:
    assert f"{tmp_path}: there is no" in told(ranks.run(2, _load_error, tmp_path), 0, 1)
    ranks.run(2, _save, tmp_path, "rows", 1)
    last = chunks_of(tmp_path)["codes"][-1]
    path = tmp_path / last.file
    content = bytearray(path.read_bytes())
    content[last.position] ^= 1
    path.write_bytes(content)
    assert re.match(rf"{path}: got checksum \w+ of", told(ranks.run(2, _load_error, tmp_path), 1))
    path.unlink()
    assert re.fullmatch(rf"{path}: cannot be found .*", told(ranks.run(3, _load_error, tmp_path), 1, 2))


def _save_own_part(path: Path) -> None:
    """Both ranks hold all but write a half; rank 0's begins where what it holds begins."""
    tensor, rank = torch.arange(24.0).view(6, 4), dist.get_rank()
    held, written = [((0, 0), tensor)], [((3 * rank, 0), tensor[3 * rank : 3 * rank + 3])]
    chunks = Chunks((6, 4), torch.float32, held, written)
    save(path, {"name": chunks}, {})
    tensor.zero_()
    checkpoint_folder.load(path, {"name": chunks})
    assert torch.equal(tensor, torch.arange(24.0).view(6, 4))


def test_written_is_less_than_held(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, _save_own_part, tmp_path)
    assert [chunk.shape for chunk in chunks_of(tmp_path)["name"]] == [(3, 4), (3, 4)]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_messages(size: int) -> None:
    """Messages may be empty."""
    ranks = Ranks()
    own = bytes([ranks.rank + 1]) * (size * ranks.rank)
    expected = [bytes([rank + 1]) * (size * rank) for rank in range(ranks.size)]
    assert ranks.gathered(own) == expected
    for source in range(ranks.size):
        assert ranks.from_rank(source, own) == expected[source]


def test_ranks_that_are_lost_while_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's collectives return at once, and fail where their result is read; a meta tensor cannot be read either."""
    monkeypatch.setattr("shardopt.checkpoint.ranks.device_of", lambda group: torch.device("meta"))
    for collective in ("all_gather", "broadcast"):
        monkeypatch.setattr(dist, collective, lambda *args, **options: None)
    ranks = Ranks()
    ranks.size = 2
    for call in (lambda: ranks.gathered(b"x"), lambda: ranks.from_rank(1, b"x"), lambda: ranks.agree(lambda: None)):
        with pytest.raises(LostRanksError, match="cannot talk to each other any more"):
            call()
