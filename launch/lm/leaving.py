"""The end of a program whose process group's threads may outlive it."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from os import _exit
from typing import NoReturn

EXIT_INTERRUPTED = 130  # the shell's code for SIGINT


def leave(main: Callable[[], int]) -> NoReturn:
    """Calls `main` and ends the process with the exit code that Python would give.

    Threads of gloo that take the interpreter's lock while Python dismantles itself abort the process, after all work is
    done. So the process does what Python does before that (waits for threads, calls atexit's handlers, flushes) and
    ends without the rest.

    Args:
        main: the program; returns its exit code, may raise or call ``sys.exit``.
    """
    code = _exit_code(main)
    _exit(_exit_code(_finish) or code)


def _finish() -> int:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


def _exit_code(program: Callable[[], int]) -> int:
    """Calls a program and returns its exit code, after printing what Python would print of an exception."""
    try:
        return program()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
