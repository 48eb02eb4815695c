"""Worker processes that live as long as the test session and run functions as the ranks of a world.

A world is so many workers with a process group of their own, made when first asked for: torch keeps too much of a
process group to make a second one in the same process. Workers are forked from a server that has imported torch, so
that starting them is cheap. After a failure their world is replaced: nothing hangs on. So is one with very many process
groups, each of which keeps two threads. All groups of a worker share one device of gloo's, whose thread looks around a
hundred times per second: with a device for each group, workers that wait take a good part of a core.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from ranks.pickling import dumps
from versions import mend_training_on_the_cpu

_MOST_GROUPS = 128  # process groups of a world that is used again
_GRACE = 3.0  # seconds that the other ranks have to fail, too, after the first one did
_PRELOAD = [
    "torch._dynamo",
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",  # the first engine of DeepSpeed takes two seconds more without
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "pydantic",  # of DeepSpeed, as is the next
    "torch.utils.cpp_extension",
    "shardopt.checkpoint",
]


class RankFailure(Exception):
    """Functions on some ranks raised, died or hung."""


class _Place(NamedTuple):
    """Where a worker belongs."""

    port: int  # of the pool's store
    world: int  # counts the worlds
    rank: int
    world_size: int


class _Task(NamedTuple):
    """A task for a worker."""

    path: list[str]
    work: bytes  # pickled (function, arguments): it can be read only once the path is set


class _Result(NamedTuple):
    """A worker's answer."""

    value: Any
    groups: int  # process groups that it has by now


class _Worker(NamedTuple):
    process: Any
    connection: Connection


class Pool:
    """Runs functions on the ranks of gloo worlds on this machine's CPU."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._worlds: dict[int, list[_Worker]] = {}
        self._started = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Calls ``function(*args)``, a function of a module, on every rank of a world; returns the results by rank.

        Raises RankFailure with the tracebacks of the ranks that failed, or that gave no answer within ``timeout``
        seconds.
        """
        workers = self._world(world_size)
        task = pickle.dumps(_Task(sys.path, dumps((function, args))))
        for worker in workers:
            worker.connection.send_bytes(task)
        answers = _collect(workers, timeout)
        failures = [f"rank {rank} of {world_size} {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self._end(world_size)
            raise RankFailure("\n" + "\n".join(failures))
        if max(result.groups for _, result in answers) > _MOST_GROUPS:
            self._end(world_size, _GRACE)
        return [result.value for _, result in answers]

    def close(self) -> None:
        """Ends all workers."""
        for world_size in list(self._worlds):
            self._end(world_size, _GRACE)

    def _world(self, world_size: int) -> list[_Worker]:
        if not all(worker.process.is_alive() for worker in self._worlds.get(world_size, [])):
            self._end(world_size)
        if world_size not in self._worlds:
            self._started += 1
            places = [_Place(self._store.port, self._started, rank, world_size) for rank in range(world_size)]
            self._worlds[world_size] = [self._start(place) for place in places]
        return self._worlds[world_size]

    def _start(self, place: _Place) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, place), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _end(self, world_size: int, seconds: float = 0.0) -> None:
        """Ends a world's ranks, which get this long to leave by themselves, as they do unless they hang."""
        workers = self._worlds.pop(world_size, [])
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            worker.process.join(seconds)
            worker.process.kill()
            worker.process.join()


def _collect(workers: list[_Worker], timeout: float) -> list[tuple[bool, Any]]:
    """The workers' answers: (True, result) or (False, what went wrong)."""
    answers: list[tuple[bool, Any]] = [(False, f"gave no answer in {timeout:g} s: it hangs")] * len(workers)
    pending = {worker.connection: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while pending:
        ready = wait(list(pending), max(deadline - time.monotonic(), 0))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            try:
                answers[rank] = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                process = workers[rank].process
                process.join(_GRACE)
                answers[rank] = (False, f"died with exit code {process.exitcode}")
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + _GRACE)
                for other in pending.values():
                    answers[other] = (False, f"gave no answer within {_GRACE:g} s of another rank's failure")
    return answers


def _serve(connection: Connection, place: _Place) -> None:
    """A worker's life: tasks in, answers out, until the other end closes."""
    gc.freeze()  # collections need not look at the modules' objects: 0.2 s each
    joined = False
    while True:
        try:
            task: _Task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            if not joined:
                _join(place)
                joined = True
            sys.path[:] = task.path
            function, args = pickle.loads(task.work)
            answer = dumps((True, _Result(function(*args), _count_groups())))
        except BaseException:
            answer = pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
        connection.send_bytes(answer)


def _count_groups() -> int:
    import torch.distributed as dist

    return len(dist.distributed_c10d._world.pg_map)


def _join(place: _Place) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    mend_training_on_the_cpu()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _share_device()
    store = dist.TCPStore("127.0.0.1", place.port, is_master=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"world{place.world}", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(minutes=5),
    )


def _share_device() -> None:
    """Lets all process groups that this process will make use the same device of gloo's."""
    from torch.distributed import distributed_c10d

    gloo: Any = distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class SharingGloo(gloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
            options = gloo._Options()
            options._devices = [device]
            options._timeout = timeout
            for name, value in others.items():  # newer versions of PyTorch have more options
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharingGloo  # type: ignore[misc]
