"""Small checkpoints in one process: saved, loaded, compared, damaged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardopt
from attack.index_file import INDEX, file_name, read_index, strict_tensors

LOCK = "checkpoint.lock"


def values_of(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits; NaNs of all kinds are among the floats."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return (numbers % 2).bool()[..., 0] if dtype == torch.bool else numbers.view(dtype)[..., 0]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensors_in(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The dtype, shape and bytes of each tensor in a checkpoint, by the tests' own reader."""
    found = strict_tensors(folder, read_index(folder))
    assert not isinstance(found, str), found
    return found


def contents(model: nn.Module, optimizer: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The dtype, shape and bytes of each tensor of a run, however it is sharded. All ranks must call this."""
    with TemporaryDirectory() as folder:
        shared = [folder]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)
        shardopt.checkpoint.save(shared[0], model, optimizer)
        found = tensors_in(Path(shared[0]))
        if dist.is_initialized():
            dist.barrier()
    return found


class Two(nn.Module):
    """A parameter and a buffer of random bits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first = nn.Parameter(values_of((8, 16), torch.float32, seed))
        self.register_buffer("second", values_of((8, 4), torch.uint8, seed))


def saved(path: Path, seed: int = 0) -> None:
    """Saves two tensors."""
    shardopt.checkpoint.save(path, Two(seed), seed=seed)


def assert_holds(path: Path, seed: int = 0) -> None:
    """Asserts that the tensors of :func:`saved` can be loaded."""
    model, expected = Two(99), Two(seed)
    assert shardopt.checkpoint.load(path, model).extra == {"seed": seed}
    assert bits(model.first) == bits(expected.first)
    assert bits(model.second) == bits(expected.second)


def assert_only(path: Path, seed: int = 0) -> None:
    """Demands that the checkpoint loads, and that nothing else is in the folder."""
    assert_holds(path, seed)
    assert sorted(os.listdir(path)) == sorted([the_data_file(path).name, INDEX, LOCK])


def data_files(path: Path) -> list[str]:
    """The names of the data files of a checkpoint."""
    content = read_index(path)
    return [file_name(content, number) for number, stored in enumerate(content["files"]) if stored is not None]


def the_data_file(path: Path) -> Path:
    (name,) = data_files(path)
    return path / name


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
