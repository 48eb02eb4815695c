"""Repeats what failed for a moment, as network file systems and object stores do."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_PAUSES = (0.1, 0.3, 1.0)  # seconds before each further attempt
_TRANSIENT = frozenset(
    [
        *(errno.EAGAIN, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY),
        *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET),
        *(errno.ENETRESET, errno.ENETUNREACH, errno.EHOSTDOWN),
    ]
)


def retried(work: Callable[[], T]) -> T:
    """Calls a function, and again up to three times if it fails with an error that may pass.

    Raises:
        OSError: the last error; at once if it is one that does not pass, such as a full disk.
    """
    for pause in _PAUSES:
        try:
            return work()
        except OSError as error:
            if error.errno not in _TRANSIENT and not isinstance(error, TimeoutError | ConnectionError):
                raise
        time.sleep(pause)
    return work()
