"""Delays Ctrl-C (SIGINT) until a point at which a save or load may stop.

Python raises KeyboardInterrupt between any two bytecodes, which would leave files half written, threads running, and
locks of other libraries held.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_handler: Callable[[int, FrameType | None], Any] | None = None  # the program's handler, while interrupts are deferred
_interrupted: list[tuple[int, FrameType | None]] = []


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Delays SIGINT until the next :func:`interruption_point`, or until the end of the context.

    Changes nothing outside the main thread, which alone gets signals, or if the handler of SIGINT is no Python code.
    """
    global _handler
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler) or _handler is not None:
        yield
        return
    _interrupted.clear()
    try:
        _handler = handler
        signal.signal(signal.SIGINT, lambda number, frame: _interrupted.append((number, frame)))
        yield
    finally:
        _handler = None
        signal.signal(signal.SIGINT, handler)
        _deliver(handler)


def interruption_point() -> None:
    """Runs the program's handler for a delayed SIGINT, which usually raises KeyboardInterrupt."""
    if _handler is not None and threading.current_thread() is threading.main_thread():
        _deliver(_handler)


def _deliver(handler: Callable[[int, FrameType | None], Any]) -> None:
    if _interrupted:
        arguments = _interrupted[0]
        _interrupted.clear()
        handler(*arguments)
