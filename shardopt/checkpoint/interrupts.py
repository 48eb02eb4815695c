"""Delays Ctrl-C (SIGINT) until a place where a save or load may stop.

Python raises KeyboardInterrupt between any two bytecodes: files would be left half written, threads running, and locks
of other libraries held.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_handler: Callable[[int, FrameType | None], Any] | None = None  # the program's, while interrupts are deferred
_interrupted: list[tuple[int, FrameType | None]] = []


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Has SIGINT wait for the next :func:`interruption_point`, or for the end.

    Outside the main thread, which alone gets signals, and where SIGINT does not run Python code, nothing is changed.
    """
    global _handler
    own = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(own) or _handler is not None:
        yield
        return
    _interrupted.clear()
    try:
        _handler = own
        signal.signal(signal.SIGINT, lambda number, frame: _interrupted.append((number, frame)))
        yield
    finally:
        _handler = None
        signal.signal(signal.SIGINT, own)
        _deliver(own)


def interruption_point() -> None:
    """Lets a SIGINT that came meanwhile take effect: usually by a KeyboardInterrupt."""
    if _handler is not None and threading.current_thread() is threading.main_thread():
        _deliver(_handler)


def _deliver(handler: Callable[[int, FrameType | None], Any]) -> None:
    if _interrupted:
        arguments = _interrupted[0]
        _interrupted.clear()
        handler(*arguments)
