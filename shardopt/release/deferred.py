"""A worker thread that takes optimizer steps while the backward pass, or the next forward pass, goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import RLock
from weakref import WeakSet

import torch

#: Default limit of steps in flight: each keeps its gradient in memory until it is done.
MOST_WAITING = 4

_all: WeakSet[DeferredSteps] = WeakSet()


def _before_fork() -> None:
    """Waits until no step is in flight: a forked child process has the parameters, but not the worker thread."""
    for steps in tuple(_all):
        for step in steps.unfinished:  # submit() and wait() replace the list
            step.wait()
            step.taken.done()  # acquires the future's lock: the worker thread has released it, no copy stays locked


def _after_fork() -> None:
    """Makes the next step in a forked child start a new worker thread; fails steps that can no longer be taken."""
    for steps in tuple(_all):
        steps.restart()
        for step in steps.unfinished:
            if not step.taken.done():  # submitted by another thread of the parent between _before_fork() and the fork
                error = "got a fork while a step was in flight, expected none; call optimizer.synchronize() before it"
                step.taken.set_exception(RuntimeError(error))


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


class DeferredStep:
    """One step, or one copy of a gradient to the host, that the worker thread takes; its submitter can wait for it.

    Args:
        work: the function that takes the step.
        keeps: objects whose memory the step reads or writes: referenced until this object is dropped.
        stream: the CUDA stream in which the step's copies are queued; None for parameters on the CPU.
    """

    def __init__(self, work: Callable[[], None], keeps: object, stream: torch.cuda.Stream | None) -> None:
        self.taken: Future[None] = Future()
        self._work, self._keeps, self._stream = work, keeps, stream
        self._ready = None if stream is None else torch.cuda.current_stream(stream.device).record_event()
        self._back: torch.cuda.Event | None = None

    def take(self) -> None:
        """Runs the step; on a GPU after the work queued when this was made. Stores an exception in :attr:`taken`."""
        try:
            if self._stream is None or self._ready is None:
                self._work()
            else:
                with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
                    self._stream.wait_event(self._ready)
                    self._work()
                back = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # no busy wait
                self._back = self._stream.record_event(back)
        except BaseException as error:
            self.taken.set_exception(error)
        else:
            self.taken.set_result(None)

    def wait(self) -> None:
        """Waits until the step has run or raised and its copies are complete: any stream may read the parameter."""
        wait([self.taken])
        if self._back is not None:
            self._back.synchronize()


class DeferredSteps:
    """A worker thread that takes steps, and copies gradients to the host, one at a time in the order of submission.

    If the thread cannot be started, the submitting thread does the work itself.

    Args:
        most_waiting: the largest number of unfinished tasks before :meth:`submit` waits, at least 1.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self.unfinished: list[DeferredStep] = []
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}  # two per device
        self.restart()
        _all.add(self)

    def restart(self) -> None:
        """Forgets the worker thread, which a forked child lacks: the next step starts one."""
        self._lock = RLock()  # the backward pass has a thread per device
        self._thread: ThreadPoolExecutor | None = None

    def submit(
        self,
        device: torch.device,
        number: int,
        work: Callable[[], None],
        keeps: object,
        keeps_gradient: bool,
    ) -> DeferredStep:
        """Queues a step for the worker thread.

        Args:
            device: the parameter's device.
            number: the parameter's index, -1 for a copy of a gradient to the host; odd and even ones use two streams.
            work: the function that takes the step.
            keeps: objects whose memory the step uses, kept alive until it has run.
            keeps_gradient: whether ``keeps`` has a gradient on the device: if so, first waits while too many do.

        Raises:
            Exception: with ``keeps_gradient``, what an earlier step raised; the new step is not taken.
        """
        with self._lock:
            if keeps_gradient:
                self.check()
            else:  # lets go of the gradients of steps that are done
                self.unfinished = [x for x in self.unfinished if not x.taken.done() or x.taken.exception()]
            while keeps_gradient and len(self.unfinished) >= self._most_waiting:
                wait([step.taken for step in self.unfinished], return_when=FIRST_COMPLETED)
                self.check()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "shardopt", torch.set_num_threads, (torch.get_num_threads(),))
            # Two streams per device: the next step need not wait until the copies back of this one are done.
            place = device, number % 2
            if device.type == "cuda" and place not in self._streams:
                self._streams[place] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            step = DeferredStep(work, keeps, self._streams.get(place))
            self.unfinished.append(step)
            try:
                self._thread.submit(step.take)
            except (RuntimeError, MemoryError):  # no thread could be started, or the interpreter ends
                self._thread = None
                step.take()
            return step

    def wait(self) -> None:
        """Waits for all steps; current streams wait for their copies. :meth:`check` raises the steps' exceptions."""
        with self._lock:
            wait([step.taken for step in self.unfinished])
            for (device, _), stream in self._streams.items():
                torch.cuda.current_stream(device).wait_stream(stream)

    def check(self) -> None:
        """Drops finished steps, with the gradients that they keep; raises the exception of the first that failed."""
        with self._lock:
            done = [step for step in self.unfinished if step.taken.done()]
            self.unfinished = [step for step in self.unfinished if step not in done]
        for step in done:
            step.taken.result()
