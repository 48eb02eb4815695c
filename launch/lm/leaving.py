"""Ends a process whose process group's threads may still run."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from os import _exit
from typing import Any, NoReturn, TextIO

EXIT_UNWRITTEN = 120  # Python's code where standard output or error cannot be flushed
EXIT_INTERRUPTED = 130  # the shell's code for SIGINT


def leave(main: Callable[[], int]) -> NoReturn:
    """Calls `main` and ends the process as Python would: with its exit code, or by SIGINT after a KeyboardInterrupt.

    Gloo's threads abort the process if they take the interpreter's lock while Python finalizes, after all work is done.
    Therefore this function waits for threads, calls atexit's handlers and flushes standard output and error, as Python
    does, and then ends the process without finalizing Python. An error in one of these steps is printed and does not
    stop the steps after it; a failed flush makes the exit code 120.

    Args:
        main: the program; returns its exit code, may raise or call ``sys.exit``.
    """
    code = _exit_code(main)
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        _guarded(step)
    flushed = [_guarded(stream.flush) for stream in (sys.stdout, sys.stderr) if _is_open(stream)]
    if code is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        _exit(EXIT_INTERRUPTED)  # only where SIGINT is blocked
    _exit(code if all(flushed) else EXIT_UNWRITTEN)


def _guarded(step: Callable[[], Any]) -> bool:
    """Calls a function, prints an exception that it raises, and returns whether it raised none."""
    try:
        step()
    except BaseException as error:
        _print(error)
        return False
    return True


def _is_open(stream: TextIO | None) -> bool:
    """Whether a standard stream exists and is open; the program may have closed it or set it to None."""
    return stream is not None and not stream.closed


def _exit_code(program: Callable[[], int]) -> int | None:
    """Calls a program and returns its exit code, None for an interrupt; prints an exception as Python would."""
    try:
        return program()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        with suppress(Exception):
            print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        _print(error)
        return None if isinstance(error, KeyboardInterrupt) else 1


def _print(error: BaseException) -> None:
    with suppress(Exception):  # standard error itself may be broken
        sys.excepthook(type(error), error, error.__traceback__)
