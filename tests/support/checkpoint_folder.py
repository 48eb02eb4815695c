"""Small checkpoints in one process: saved, loaded, compared, damaged."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardopt
from shardopt.checkpoint.index import INDEX_NAME, Index, load_index, read_header
from shardopt.checkpoint.items import Chunks
from shardopt.checkpoint.ranks import Ranks
from shardopt.checkpoint.reading import read_tensors
from shardopt.checkpoint.saving import Saving
from shardopt.checkpoint.storage import LOCK_NAME, folder_at

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
    chunks = [((), tensor)]
    for dim, places in enumerate(cuts):
        edges = [0, *places, tensor.shape[dim]]
        chunks = [
            ((*offsets, start), part.narrow(dim, start, end - start))
            for offsets, part in chunks
            for start, end in itertools.pairwise(edges)
        ]
    return Chunks(tensor.shape, tensor.dtype, chunks)


def save(path: Path, tensors: Mapping[str, Chunks | Tensor], header: dict[str, Any] | None = None) -> None:
    ranks = Ranks()
    ranks.agree(lambda: Saving(folder_at(path), {} if header is None else header)).run(_chunks(tensors), ranks)


def load(path: Path, tensors: Mapping[str, Chunks | Tensor]) -> None:
    folder, ranks = folder_at(path), Ranks()
    index = ranks.agree(lambda: load_index(folder))
    ranks.agree(lambda: read_tensors(folder, index, _chunks(tensors)))


def index_of(path: Path) -> Index:
    return load_index(folder_at(path))


def _chunks(tensors: Mapping[str, Chunks | Tensor]) -> dict[str, Chunks]:
    return {name: x if isinstance(x, Chunks) else Chunks.whole(x) for name, x in tensors.items()}


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
    """Demands that the checkpoint loads, and that nothing else is in the folder."""
    assert_holds(path, seed)
    assert sorted(os.listdir(path)) == sorted([*index_of(path).file_names, INDEX_NAME, LOCK_NAME])


def the_data_file(path: Path) -> Path:
    (name,) = index_of(path).file_names
    return path / name


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def linear_run(seed: int) -> tuple[torch.nn.Module, shardopt.AdamW8bit]:
    """A small model and its optimizer after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 66), torch.nn.Linear(66, 64))
    optimizer = shardopt.AdamW8bit(model.parameters(), lr=0.1 + seed)
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def content_of(model: torch.nn.Module, optimizer: shardopt.AdamW8bit) -> list[Any]:
    """All that a load changes."""
    state = [entry for param in model.parameters() for entry in optimizer.state[param].values()]
    return [optimizer.param_groups[0]["lr"], *(x.tolist() for x in (*model.parameters(), *state))]
