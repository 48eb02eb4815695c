"""A worker thread that takes optimizer steps while the backward pass, or the next forward pass, goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import RLock
from weakref import WeakSet

import torch

_workers: WeakSet[WorkerThread] = WeakSet()


def _before_fork() -> None:
    """Waits until no task is in flight: a forked child process has the parameters, but not the worker thread."""
    for worker in tuple(_workers):
        for task in worker.unfinished:  # submit() and raise_errors() replace the list
            task.wait()
            task.future.done()  # takes its lock: the worker thread has let go of it, and the child's copy is unlocked


def _after_fork() -> None:
    """Makes the next task in a forked child start a new worker thread; fails tasks that can no longer be run."""
    for worker in tuple(_workers):
        worker.restart()
        for task in worker.unfinished:
            if not task.future.done():  # submitted by another thread of the parent between _before_fork() and the fork
                error = "got a fork while a step was in flight, expected none; call optimizer.synchronize() before it"
                task.future.set_exception(RuntimeError(error))


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


class WorkerTask:
    """A parameter's step, or the copy of a gradient to the host, that the worker thread runs.

    Args:
        keep_alive: objects whose memory the function reads or writes: referenced until this object is dropped.
        stream: the CUDA stream in which the function queues its copies; None for parameters on the CPU.

    Attributes:
        future: a future that is done once the function has returned, with None, or has raised an exception.
    """

    def __init__(self, work: Callable[[], None], keep_alive: object, stream: torch.cuda.Stream | None) -> None:
        self.future: Future[None] = Future()
        self._work, self._keep_alive, self._stream = work, keep_alive, stream
        self._submitted = None if stream is None else torch.cuda.current_stream(stream.device).record_event()
        self._copied: torch.cuda.Event | None = None  # the end of the copies that the function has queued

    def run(self) -> None:
        """Runs the function, on a GPU after work queued before the submission; sets :attr:`future` and never raises."""
        try:
            if self._stream is None or self._submitted is None:
                self._work()
            else:
                with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
                    self._stream.wait_event(self._submitted)
                    self._work()
                copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # no busy wait
                self._copied = self._stream.record_event(copied)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)

    def wait(self) -> None:
        """Waits until the function has returned or raised, and its copies are done: any stream may read the memory."""
        wait([self.future])
        if self._copied is not None:
            self._copied.synchronize()


class WorkerThread:
    """Runs tasks (steps, and copies of gradients to the host) one at a time, in the order of submission.

    If the thread cannot be started, the submitting thread runs the task itself.

    Args:
        limit: the largest number of unfinished tasks before :meth:`submit` waits, at least 1.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.unfinished: list[WorkerTask] = []
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}  # two per device
        self.restart()
        _workers.add(self)

    def restart(self) -> None:
        """Drops thread and lock: in a forked child the thread is gone, and a thread of the parent may hold the lock."""
        self._lock = RLock()  # the backward pass has a thread per device; reentrant, as submit() calls raise_errors()
        self._executor: ThreadPoolExecutor | None = None  # the next task starts it

    def submit(
        self, device: torch.device, index: int, work: Callable[[], None], keep_alive: object, *, keeps_gradient: bool
    ) -> WorkerTask:
        """Queues a task. With ``keeps_gradient``, if an earlier task has failed, raises its exception instead.

        Args:
            device: the parameter's device.
            index: a number. Tasks with odd and with even numbers use two CUDA streams, so that one task need not wait
                for the other's copies.
            work: see :class:`WorkerTask`.
            keep_alive: see :class:`WorkerTask`.
            keeps_gradient: whether the task keeps a gradient on the device: if so, first waits while the number of
                unfinished tasks is at the limit.
        """
        with self._lock:
            if keeps_gradient:
                self.raise_errors()
                while len(self.unfinished) >= self._limit:
                    wait([task.future for task in self.unfinished], return_when=FIRST_COMPLETED)
                    self.raise_errors()
            else:  # drops finished tasks with their gradients, but keeps failed ones for raise_errors()
                self.unfinished = [x for x in self.unfinished if not x.future.done() or x.future.exception()]
            if self._executor is None:  # the number of PyTorch's threads is a setting of each thread
                self._executor = ThreadPoolExecutor(1, "shardopt", torch.set_num_threads, (torch.get_num_threads(),))
            key = device, index % 2
            if device.type == "cuda" and key not in self._streams:
                self._streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            task = WorkerTask(work, keep_alive, self._streams.get(key))
            self.unfinished.append(task)
            try:
                self._executor.submit(task.run)
            except (RuntimeError, MemoryError):  # no thread could be started, or the interpreter ends
                self._executor = None
                task.run()
            return task

    def wait(self) -> None:
        """Waits for all tasks; current streams wait for their copies. :meth:`raise_errors` raises their exceptions."""
        with self._lock:
            wait([task.future for task in self.unfinished])
            for (device, _), stream in self._streams.items():
                torch.cuda.current_stream(device).wait_stream(stream)

    def raise_errors(self) -> None:
        """Drops finished tasks, with the gradients that they keep; raises the exception of the first that failed."""
        with self._lock:
            done = [task for task in self.unfinished if task.future.done()]
            self.unfinished = [task for task in self.unfinished if task not in done]
        for task in done:
            task.future.result()
