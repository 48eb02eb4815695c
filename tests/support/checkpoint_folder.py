"""Small checkpoints in one process: saved, loaded, compared, damaged."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shardopt.checkpoint.chunks import Chunk, Chunks
from shardopt.checkpoint.folder_lock import LOCK_NAME
from shardopt.checkpoint.index import INDEX_NAME, load_index
from shardopt.checkpoint.replicas import ReplicaPlanner
from shardopt.checkpoint.storage import PortableReader, PortableWriter, plain_errors, read_header

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
        dcp.save(tensors, storage_writer=writer, planner=ReplicaPlanner())


def load(path: Path, tensors: dict[str, Any]) -> None:
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    with plain_errors():
        dcp.load(tensors, storage_reader=PortableReader(path), planner=planner)


def saved(path: Path, seed: int = 0) -> dict[str, Tensor]:
    """Saves two tensors, each in two chunks."""
    tensors = {"first": values_of((8, 16), torch.float32, seed), "second": values_of((8, 4), torch.uint8, seed)}
    save(path, {name: cut(tensor, ((4,), ())) for name, tensor in tensors.items()}, {"seed": seed})
    return tensors


def assert_holds(path: Path, seed: int = 0) -> None:
    """Asserts that the tensors of :func:`saved` can be loaded."""
    tensors = {"first": torch.zeros(8, 16), "second": torch.zeros(8, 4, dtype=torch.uint8)}
    load(path, {name: cut(tensor, ((), ())) for name, tensor in tensors.items()})
    assert bits(tensors["first"]) == bits(values_of((8, 16), torch.float32, seed))
    assert bits(tensors["second"]) == bits(values_of((8, 4), torch.uint8, seed))
    assert read_header(path) == {"seed": seed}


def assert_only(path: Path, seed: int = 0) -> None:
    """It can, and nothing else is in the folder."""
    assert_holds(path, seed)
    assert sorted(os.listdir(path)) == sorted([*load_index(path).files, INDEX_NAME, LOCK_NAME])


def the_data_file(path: Path) -> Path:
    (name,) = load_index(path).files
    return path / name


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
