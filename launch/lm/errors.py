"""The end of a run: with one line on stderr for bad input (exit code 2) and the loss of another rank (exit code 3)."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from os import _exit
from typing import NoReturn

EXIT_BAD_INPUT = 2
EXIT_RANKS_LOST = 3


class UserError(Exception):
    """Unusable input; the message says what was got, what was expected, and the remedy."""


class RanksLost(Exception):
    """Another rank is gone, through no fault of this rank."""

    @classmethod
    def because(cls, error: BaseException) -> RanksLost:
        """The loss of a rank that a failed collective shows; the first sentence of its error is the reason."""
        return cls(
            f"another rank is gone or did not answer in time ({_one_line(error).split('. ')[0]}): see the message of "
            "that rank, then start again with --resume auto"
        )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def report(error: UserError | RanksLost) -> int:
    """Prints `error` as one line, once per machine, and returns the exit code.

    torchrun adds its own report to the line, and exits with 1 whatever the ranks' exit codes.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(10.0)  # torchrun stops all ranks when the first one fails: this one has an error of its own, then
    print(f"train.py: error: {_one_line(error)}", file=sys.stderr, flush=True)
    return EXIT_BAD_INPUT if isinstance(error, UserError) else EXIT_RANKS_LOST


def leave(code: int) -> NoReturn:
    """Ends the process as ``sys.exit`` does, but without finalizing Python, during which gloo's threads may abort it.

    Waits for threads, calls atexit's handlers and flushes standard output and error, or raises if that fails.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    _exit(code)
