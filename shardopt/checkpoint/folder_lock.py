"""A lock against two saves into one folder at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
import weakref
from contextlib import suppress
from pathlib import Path

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.own_files import open_own

LOCK_NAME = "checkpoint.lock"

_PATIENCE = 10.0  # seconds: a killed process may take some time to end
_INTERVAL = 0.05  # seconds
_NO_LOCKS = frozenset([errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK])


class FolderLock:
    """An exclusive ``flock`` on a file of the folder. The system releases the lock when the holding process ends.

    The file stays in the folder, because after its removal two processes could lock two files of the same name.

    Args:
        folder: the folder, which must exist.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._close: weakref.finalize[..., FolderLock] | None = None

    def acquire(self) -> None:
        """Takes the lock, and waits up to 10 seconds for another save to end.

        Raises:
            CheckpointError: another save goes on for longer, or the file cannot be opened or locked.
        """
        if self._close is not None:
            return
        try:
            descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be opened: {error}; choose another path") from error
        try:
            _lock(descriptor, self._path)
            with suppress(OSError):  # only a hint: on a full disk, strays can be removed only after locking
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._close = weakref.finalize(self, os.close, descriptor)
        _held.add(self)

    def is_free(self) -> bool:
        """Whether no process holds the lock; False where the file system has no locks."""
        try:
            descriptor = open_own(self._path)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def release(self) -> None:
        """Releases the lock. Does nothing if the lock is not held."""
        close, self._close = self._close, None
        if close is not None:
            close()


def _lock(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                raise CheckpointError(
                    f"{path.parent}: got another save into this folder, by {holder}, expected one at a time; wait for "
                    "it, or end that process if it belongs to a run that failed"
                ) from None
            time.sleep(_INTERVAL)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise CheckpointError(f"{path}: cannot be locked: {error}; choose another path") from error
            warnings.warn(
                f"{path.parent}: this file system has no locks ({error.strerror}); make sure that only one run saves "
                "into this folder",
                RuntimeWarning,
                stacklevel=2,
            )
            return None


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Closes a forked child's copies of its parent's lock files, because a lock ends with its last open copy."""
    for lock in list(_held):
        with suppress(OSError):
            lock.release()


os.register_at_fork(after_in_child=_release_in_child)
