"""Steps in a thread of their own, in order: they wait for copies while the backward pass goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import torch

#: Steps that may be waiting: each keeps its gradient.
MOST_WAITING = 4


class _Step(NamedTuple):
    """A step on its way, and what comes after it."""

    taken: Future[None]
    after: Callable[[], None]


class DeferredSteps:
    """A thread that carries out one step after another.

    What comes after a step is done by whoever submits the next one or waits: gradients are not to be freed while
    another thread may read the parameter's attribute.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # the backward pass has a thread per device
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[_Step] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def submit(self, device: torch.device, step: Callable[[], None], after: Callable[[], None]) -> None:
        """Has a step taken, once what the device was told so far is done. Waits if too many steps do.

        Args:
            device: of what is stepped.
            step: takes it, in the other thread.
            after: is called in this one.
        """
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "shardopt", torch.set_num_threads, (torch.get_num_threads(),))
            work = step
            if device.type == "cuda":
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                ready = torch.cuda.current_stream(device).record_event()
                work = _in_stream(self._streams[device], ready, step)
            self._waiting.append(_Step(self._thread.submit(work), after))
            while self._waiting and (len(self._waiting) > MOST_WAITING or self._waiting[0].taken.done()):
                self._finish(self._waiting.popleft())

    def wait(self) -> None:
        """Waits until all are done; what is computed next sees them.

        Raises:
            Exception: what the first step raised that failed.
        """
        for step in self._waiting:
            step.taken.exception()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        waiting, self._waiting = self._waiting, deque()
        for step in waiting:
            if step.taken.exception() is None:
                step.after()
        for step in waiting:
            step.taken.result()

    def _finish(self, step: _Step) -> None:
        step.taken.result()
        step.after()


def _in_stream(stream: torch.cuda.Stream, ready: torch.cuda.Event, step: Callable[[], None]) -> Callable[[], None]:
    def work() -> None:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            stream.wait_event(ready)
            step()

    return work
