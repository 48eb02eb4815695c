"""The ranks of a run: this process's rank and device, the process group, and the few collectives of the job."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from lm.errors import RanksLost, UserError, report

_WATCH_INTERVAL = 1.0  # seconds
_MPI = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")  # that mpirun sets


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks, according to its launcher; a single rank without a launcher."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


def discover(device: str) -> Ranks:
    """Finds this rank and its device, from the caller's process group or else from the launcher's environment.

    Args:
        device: "auto", "cpu" or "cuda".

    Raises:
        UserError: `device` is "cuda" on a machine without GPUs, a machine has fewer GPUs than ranks, or mpi4py is
            missing under mpirun.
    """
    if not dist.is_initialized() and "RANK" not in os.environ and any(name in os.environ for name in _MPI):
        os.environ.update(_of_mpi())
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    rank, world_size, local_rank = (int(os.environ.get(name, default)) for name, default in names.items())
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus == 0:
        raise UserError("device cuda: no GPU found; pass --device cpu")
    if gpus == 0:
        return Ranks(rank, world_size, local_rank, torch.device("cpu"))
    if local_rank >= gpus:
        raise UserError(
            f"rank {local_rank + 1} of a machine with {gpus} GPUs: start one rank per GPU, or pass --device cpu"
        )
    return Ranks(rank, world_size, local_rank, torch.device("cuda", local_rank))


def _of_mpi() -> dict[str, str]:
    """The variables that torchrun would have set, of ranks that mpirun started."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UserError(f"started by mpirun, which needs mpi4py: pip install 'shardopt[mpi]' ({error})") from error
    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    alone = local.Get_size() == world.Get_size()  # on one machine, whose name may not resolve to an address
    with socket.socket() as free:
        free.bind(("", 0))
        address, port = world.bcast(("127.0.0.1" if alone else socket.gethostname(), free.getsockname()[1]))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    found = (world.Get_rank(), world.Get_size(), local.Get_rank(), address, port)
    MPI.Finalize()  # now, because finalizing at the end of the process would wait for ranks that may hang
    return dict(zip(names, map(str, found), strict=True))


@contextmanager
def process_group(ranks: Ranks, timeout: float) -> Iterator[None]:
    """Holds the default process group open: the caller's if there is one, else a new one.

    Without a launcher, the new group has one process.

    Args:
        ranks: this rank.
        timeout: seconds that a rank waits for another rank.

    Raises:
        RanksLost: another rank is gone, or did not answer in time.
    """
    if dist.is_initialized():
        yield
        return
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    _end_with_torchrun()
    try:
        dist.init_process_group(
            backend,
            rank=ranks.rank,
            world_size=ranks.world_size,
            store=_store(ranks),
            timeout=timedelta(seconds=timeout),
        )
        try:
            yield
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo/" in str(error):
            raise RanksLost.because(error) from error
        raise


def _store(ranks: Ranks) -> Any:
    """The store for the rendezvous; None for the default, which the environment describes."""
    if "MASTER_ADDR" not in os.environ:
        return dist.HashStore()  # type: ignore[attr-defined]
    # torchrun keeps its store over restarts, with the addresses of lost ranks, so each start has its own prefix.
    # Machines count restarts differently, so with several machines torchrun must not keep its store (see
    # multinode/torchrun.sh).
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not kept or int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
        return None
    store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world_size))  # type: ignore[no-untyped-call]
    return PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def _end_with_torchrun() -> None:
    """Ends this process when torchrun, its parent, ends: without a launcher the rank would train on uncontrolled."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_WATCH_INTERVAL)
        os._exit(report(RanksLost("torchrun, which started this rank, is gone: start again with --resume auto")))

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, daemon=True).start()


def all_sum(values: Sequence[float]) -> list[float]:
    """Sums numbers over the ranks, in float64, on the host."""
    if not dist.is_initialized():
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """The seconds that a call takes, with all that it has the device do."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began
