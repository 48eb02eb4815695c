"""Steps in a thread of their own, in order: they wait for copies while the backward pass goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

#: Steps that may be waiting: each keeps its gradient.
_MOST = 4


class DeferredSteps:
    """A thread that carries out one step after another."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def submit(self, device: torch.device, step: Callable[[], None]) -> None:
        """Has a step taken, once what the device was told so far is done. Waits if too many steps do."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "shardopt", torch.set_num_threads, (torch.get_num_threads(),))
        work = step
        if device.type == "cuda":
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            ready = torch.cuda.current_stream(device).record_event()
            work = _in_stream(self._streams[device], ready, step)
        self._pending.append(self._thread.submit(work))
        if len(self._pending) > _MOST:
            self._pending.popleft().result()

    def wait(self) -> None:
        """Waits until all are done; what is computed next sees them.

        Raises:
            Exception: what the first step raised that failed.
        """
        pending, self._pending = list(self._pending), deque()
        for future in pending:
            future.exception()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        for future in pending:
            future.result()


def _in_stream(stream: torch.cuda.Stream, ready: torch.cuda.Event, step: Callable[[], None]) -> Callable[[], None]:
    def work() -> None:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            stream.wait_event(ready)
            step()

    return work
