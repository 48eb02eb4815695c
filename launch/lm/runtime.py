"""The ranks of a run: this process's rank and device, the process group, and the few collectives of the job.

torchrun and ``deepspeed`` put rank and world size into the environment. Under ``mpirun`` and ``srun`` this module adds
the variables that torchrun would have set, so that no other module depends on the launcher.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

# Variables that mpirun sets: Open MPI's, and MPICH's and Intel MPI's.
_MPI = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks, according to its launcher; a single rank without a launcher."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this rank writes files and prints: rank 0."""
        return self.rank == 0


def discover(device: str) -> Ranks:
    """Finds this rank and its device, from the caller's process group or else from the launcher's environment.

    Args:
        device: "auto", "cpu" or "cuda".

    Raises:
        UserError: `device` is "cuda" on a machine without GPUs, a machine has fewer GPUs than ranks, mpi4py is missing
            under mpirun, or Slurm's variables cannot be parsed.
    """
    if not dist.is_initialized():
        os.environ.update(_of_launcher(os.environ))
    rank, world_size = _from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1)
    local_rank = _from_environment("LOCAL_RANK", 0)
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


def _from_environment(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def _of_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would have set, under mpirun or srun; empty under other launchers."""
    if "RANK" in environment:
        return {}
    if any(name in environment for name in _MPI):  # before Slurm, because mpirun may run under Slurm
        return _of_mpi(environment)
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return _of_slurm(environment)
    return {}


def _of_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """Asks MPI for the ranks and the first rank's address, through mpi4py."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UserError(f"started by mpirun, which needs mpi4py: pip install 'shardopt[mpi]' ({error})") from error
    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    alone = local.Get_size() == world.Get_size()  # on one machine, whose name may not resolve to an address
    with socket.socket() as free:
        free.bind(("", 0))
        first = ("127.0.0.1" if alone else socket.gethostname(), free.getsockname()[1])
        address, port = world.bcast(first)
    found = {
        "RANK": str(world.Get_rank()),
        "WORLD_SIZE": str(world.Get_size()),
        "LOCAL_RANK": str(local.Get_rank()),
        "MASTER_ADDR": environment.get("MASTER_ADDR", address),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }
    MPI.Finalize()  # now, because finalizing at the end of the process would wait for ranks that may hang
    return found


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Reads srun's variables; the first rank is on the first node of the step."""
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": environment.get("MASTER_ADDR", _first_host(environment["SLURM_STEP_NODELIST"])),
        # Derived from the job's id, because jobs may share a node.
        "MASTER_PORT": environment.get("MASTER_PORT", str(15000 + int(environment["SLURM_JOB_ID"]) % 10000)),
    }


def _first_host(text: str) -> str:
    """The first of Slurm's ``node[03-05,9],other``: node03."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", text)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST: got {text!r}, expected host names; set MASTER_ADDR to the first rank's")
    return match[1] + (match[2] or "") + match[3]


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
    if not kept or _from_environment("GROUP_WORLD_SIZE", 1) > 1:
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


@contextmanager
def deterministic() -> Iterator[None]:
    """Makes PyTorch use deterministic algorithms, and raise for operations that have none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def all_sum(values: Sequence[float]) -> list[float]:
    """Sums numbers over the ranks, in float64, on the host."""
    if not dist.is_initialized():
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """The seconds that a call takes, with all that it has the device do."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
