"""Steps in a thread of their own: they wait for copies while the backward pass, or the next forward pass, goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import RLock
from weakref import WeakSet

import torch

#: Steps that may be under way, unless asked for more: each keeps its gradient.
MOST_WAITING = 4

_all: WeakSet[DeferredSteps] = WeakSet()


def _before_fork() -> None:
    """Waits until no step is in flight: a forked child gets the parameters, and not the thread that steps them."""
    for steps in tuple(_all):
        for step in steps.unfinished:  # submit() and wait() replace the list
            step.wait()
            step.taken.done()  # once the thread has let go of the future's lock


def _after_fork() -> None:
    """Has the next step in a forked child start a thread."""
    for steps in tuple(_all):
        steps.restart()
        for step in steps.unfinished:
            if not step.taken.done():  # another thread has submitted it since
                error = "got a fork while a step was in flight, expected none; call optimizer.synchronize() before it"
                step.taken.set_exception(RuntimeError(error))


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


class DeferredStep:
    """A step on its way.

    Args:
        work: takes the step.
        keeps: objects that are kept alive until the step has run.
        stream: its copies run in it; None on the CPU.
    """

    def __init__(self, work: Callable[[], None], keeps: object, stream: torch.cuda.Stream | None) -> None:
        self.taken: Future[None] = Future()
        self._work, self._keeps, self._stream = work, keeps, stream
        self._ready = None if stream is None else torch.cuda.current_stream(stream.device).record_event()
        self._back: torch.cuda.Event | None = None

    def take(self) -> None:
        """Runs the step, on a GPU behind the work queued when it was made. An error is left in :attr:`taken`."""
        try:
            if self._stream is None or self._ready is None:
                self._work()
            else:
                with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
                    self._stream.wait_event(self._ready)
                    self._work()
                back = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # the core has other work
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
    """A thread that carries out steps, and arrivals of gradients, one at a time.

    Where the system refuses the thread, the caller carries them out.

    Args:
        most_waiting: how many may be under way, at least 1.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self.unfinished: list[DeferredStep] = []
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}  # two per device
        self.restart()
        _all.add(self)

    def restart(self) -> None:
        """Has the next step start a thread."""
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
        """Has a step taken.

        Args:
            device: of what is stepped.
            number: the parameter's, or -1 for a copy of a gradient to the host; its parity chooses one of two streams.
            work: takes the step, in the other thread where there is one.
            keeps: objects that are kept alive until the step has run.
            keeps_gradient: whether a gradient on the device is among them: waits, first, while too many are under way.

        Raises:
            Exception: an earlier step raised the exception, and ``keeps_gradient``; the new step is not taken.
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
            # A step waits in its stream for its copies back, which the next one in the other stream need not wait for.
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
        """Waits until all are done; what is computed next sees them. :meth:`check` raises what they raised."""
        with self._lock:
            wait([step.taken for step in self.unfinished])
            for (device, _), stream in self._streams.items():
                torch.cuda.current_stream(device).wait_stream(stream)

    def check(self) -> None:
        """Forgets steps that are done, and raises what one of them raised."""
        with self._lock:
            done = [step for step in self.unfinished if step.taken.done()]
            self.unfinished = [step for step in self.unfinished if step not in done]
        for step in done:
            step.taken.result()
