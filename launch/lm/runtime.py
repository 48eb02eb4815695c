"""The ranks of a run: who this process is, its device, and the few collectives it needs.

torchrun and ``deepspeed`` say who a process is in the environment. What ``mpirun`` and ``srun`` say is written there in
the same words, so that nothing else needs to know what started the ranks.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from lm.errors import RanksLost, UserError, one_line, report

_WATCH_INTERVAL = 1.0  # seconds

# What Open MPI's mpirun sets, and what that of MPICH and Intel MPI does.
_MPI = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class Ranks:
    """This process among the others, as its launcher tells; alone without one."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0


def discover(device: str) -> Ranks:
    """Finds this rank, in the caller's process group or else as its launcher tells, and its device.

    Args:
        device: "auto", "cpu" or "cuda".

    Raises:
        UserError: GPUs were asked for and there are none, or fewer than ranks; or the launcher does not tell enough.
    """
    if not dist.is_initialized():
        os.environ.update(_of_launcher(os.environ))
    rank, world_size = _from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1)
    local_rank = _from_environment("LOCAL_RANK", 0)
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    # The launcher of DeepSpeed calls it LOCAL_SIZE.
    local_world_size = _from_environment("LOCAL_WORLD_SIZE", _from_environment("LOCAL_SIZE", 1))
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus == 0:
        raise UserError("device cuda: no GPU found; pass --device cpu")
    if gpus == 0:
        return Ranks(rank, world_size, local_rank, torch.device("cpu"))
    if gpus < local_world_size:
        raise UserError(
            f"{local_world_size} ranks on a machine with {gpus} GPUs: start one rank per GPU, or pass --device cpu"
        )
    return Ranks(rank, world_size, local_rank, torch.device("cuda", local_rank))


def _from_environment(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def _of_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set, from what mpirun or srun did; nothing where there is nothing to add."""
    if "RANK" in environment:
        return {}
    if any(name in environment for name in _MPI):  # before Slurm, which mpirun may itself run under
        return _of_mpi(environment)
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return _of_slurm(environment)
    return {}


def _of_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """MPI itself is asked, by mpi4py: who is who, and where the first rank is."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UserError(f"started by mpirun, which needs mpi4py: pip install 'shardopt[mpi]' ({error})") from error
    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    alone = local.Get_size() == world.Get_size()  # on one machine, whose name may not have an address
    with socket.socket() as free:
        free.bind(("", 0))
        first = ("127.0.0.1" if alone else socket.gethostname(), free.getsockname()[1])
        address, port = world.bcast(first)
    found = {
        "RANK": str(world.Get_rank()),
        "WORLD_SIZE": str(world.Get_size()),
        "LOCAL_RANK": str(local.Get_rank()),
        "LOCAL_WORLD_SIZE": str(local.Get_size()),
        "MASTER_ADDR": environment.get("MASTER_ADDR", address),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }
    MPI.Finalize()  # at the end of the process it would wait for ranks that may hang
    return found


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """What srun sets; the first rank is on the first node of the step."""
    node = int(environment["SLURM_NODEID"])
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[node]),
        "MASTER_ADDR": environment.get("MASTER_ADDR", _first_host(environment["SLURM_STEP_NODELIST"])),
        # Jobs that share a node differ in their ids.
        "MASTER_PORT": environment.get("MASTER_PORT", str(15000 + int(environment["SLURM_JOB_ID"]) % 10000)),
    }


def _tasks_per_node(text: str) -> list[int]:
    """Reads Slurm's ``2(x3),1``: [2, 2, 2, 1]."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE: got {text!r}, expected a list like 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _first_host(text: str) -> str:
    """The first of Slurm's ``node[03-05,9],other``: node03."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", text)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST: got {text!r}, expected host names; set MASTER_ADDR to the first rank's")
    return match[1] + (match[2] or "") + match[3]


@contextmanager
def process_group(ranks: Ranks, timeout: float) -> Iterator[None]:
    """Holds the default process group open, the caller's where there is one.

    Without a launcher it is a group of one process.

    Args:
        ranks: this rank.
        timeout: seconds that a rank waits for another one.

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
    with _ending_with_torchrun(), _lost_ranks():
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


def _store(ranks: Ranks) -> Any:
    """Where the ranks meet, if not just where their environment says."""
    if "MASTER_ADDR" not in os.environ:
        return dist.HashStore()  # type: ignore[attr-defined]
    # torchrun keeps its store over restarts, and in it the addresses of ranks that are gone: each start has a part of
    # its own. Several machines do not count restarts alike; there torchrun must keep none (see multinode/torchrun.sh).
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not kept or _from_environment("GROUP_WORLD_SIZE", 1) > 1:
        return None
    store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world_size))  # type: ignore[no-untyped-call]
    return PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


@contextmanager
def _ending_with_torchrun() -> Iterator[None]:
    """Has this process end when torchrun, its parent, does: without one it would train on, out of anyone's control."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    launcher, over = os.getppid(), threading.Event()

    def watch() -> None:
        while not over.wait(_WATCH_INTERVAL):
            if os.getppid() != launcher:
                os._exit(
                    report(RanksLost("torchrun, which started this rank, is gone: start again with --resume auto"))
                )

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # no thread is to be left when the interpreter ends


@contextmanager
def _lost_ranks() -> Iterator[None]:
    """Turns what PyTorch raises where a rank is gone into an error for people."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo/" not in str(error):
            raise
        reason = one_line(error).split(". ")[0]
        raise RanksLost(
            f"another rank is gone or did not answer in time ({reason}): see what it said, then start again with "
            "--resume auto"
        ) from error


@contextmanager
def deterministic() -> Iterator[None]:
    """Has PyTorch take the algorithms that always give the same bits, and raise where there is none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


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
