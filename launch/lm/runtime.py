"""The ranks of a run: who this process is, its device, and the few collectives it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lm.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """This process among the others, as torchrun's environment tells; alone without it."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0


def discover(device: str) -> Ranks:
    """Finds this rank, in the caller's process group or else in torchrun's environment, and its device.

    Args:
        device: "auto", "cpu" or "cuda".

    Raises:
        UserError: GPUs were asked for and there are none, or fewer than ranks.
    """
    rank, world_size = _from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1)
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = _from_environment("LOCAL_RANK", 0)
    local_world_size = _from_environment("LOCAL_WORLD_SIZE", 1)
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus == 0:
        raise UserError("device cuda: no GPU found; pass --device cpu")
    if gpus == 0:
        return Ranks(rank, world_size, torch.device("cpu"))
    if gpus < local_world_size:
        raise UserError(
            f"{local_world_size} ranks on a machine with {gpus} GPUs: start one rank per GPU, or pass --device cpu"
        )
    return Ranks(rank, world_size, torch.device("cuda", local_rank))


def _from_environment(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


@contextmanager
def process_group(ranks: Ranks) -> Iterator[None]:
    """Holds the default process group open, the caller's where there is one.

    Without torchrun it is a group of one process.
    """
    if dist.is_initialized():
        yield
        return
    store = None if "MASTER_ADDR" in os.environ else dist.HashStore()  # type: ignore[attr-defined]
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def barrier() -> None:
    """Waits for all ranks."""
    all_sum([0.0])


def all_sum(values: Sequence[float]) -> list[float]:
    """Sums numbers over the ranks, in float64, on the host."""
    if not dist.is_initialized():
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
