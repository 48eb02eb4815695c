"""What ends a run in one line on stderr: bad input (exit code 2), and the loss of another rank (exit code 3)."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

EXIT_BAD_INPUT = 2
EXIT_RANKS_LOST = 3

# The first process to fail makes torchrun stop the others. Local rank 0 speaks at once; the others
# wait this long (seconds), so that they speak only where local rank 0 saw nothing wrong.
_OTHER_RANKS_WAIT = 10.0


class UserError(Exception):
    """Input that cannot be worked with; the message says what was got, expected, the remedy."""


class RanksLost(Exception):
    """Another rank is gone: not this one's fault, and nothing that it could do about."""


def one_line(error: BaseException | str) -> str:
    """Folds a message into one line."""
    return " ".join(str(error).split())


def report(error: UserError | RanksLost) -> int:
    """Prints the one line of `error`, once per machine, and returns the exit code.

    torchrun prints a report of its own after that and exits with 1, whatever the ranks' code. It
    quotes what it finds in the file named by its environment: there the line goes too.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(_OTHER_RANKS_WAIT)
    line = f"train.py: error: {one_line(error)}"
    print(line, file=sys.stderr, flush=True)
    quoted = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if quoted:
        detail = {"py_callstack": line, "timestamp": int(time.time())}
        text = json.dumps({"message": {"message": line, "extraInfo": detail}})
        Path(quoted).write_text(text, encoding="utf-8")
    return EXIT_BAD_INPUT if isinstance(error, UserError) else EXIT_RANKS_LOST
