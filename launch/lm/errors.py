"""The end of a run: with one line on stderr for bad input (exit code 2) and the loss of another rank (exit code 3)."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from os import _exit
from pathlib import Path
from typing import NoReturn

EXIT_BAD_INPUT = 2
EXIT_RANKS_LOST = 3

# Seconds that ranks other than local rank 0 wait before they report an error. torchrun stops all ranks when the first
# one fails, so the others report only errors that local rank 0 does not have.
_OTHER_RANKS_WAIT = 10.0


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
    """Folds a message into one line."""
    return " ".join(str(error).split())


def report(error: UserError | RanksLost) -> int:
    """Prints `error` as one line, once per machine, and returns the exit code.

    Writes the line also to the file that TORCHELASTIC_ERROR_FILE names, which torchrun quotes in its own report.
    torchrun exits with 1, whatever the ranks' exit codes.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(_OTHER_RANKS_WAIT)
    line = f"train.py: error: {_one_line(error)}"
    print(line, file=sys.stderr, flush=True)
    quoted = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if quoted:
        detail = {"py_callstack": line, "timestamp": int(time.time())}
        text = json.dumps({"message": {"message": line, "extraInfo": detail}})
        Path(quoted).write_text(text, encoding="utf-8")
    return EXIT_BAD_INPUT if isinstance(error, UserError) else EXIT_RANKS_LOST


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code, as ``sys.exit`` does, but without finalizing Python.

    Gloo's threads abort the process if they take the interpreter's lock while Python finalizes, after all work is done.
    Therefore this function waits for threads, calls atexit's handlers and flushes standard output and error, as Python
    does, and then ends the process. If standard output or error cannot be written, an exception says so.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    _exit(code)
