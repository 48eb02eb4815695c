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
from shardopt.checkpoint.folder import make_folder, open_own

LOCK_NAME = "checkpoint.lock"

_PATIENCE = 10.0  # seconds: a killed process may take some time to end
_INTERVAL = 0.05  # seconds
_NO_LOCKS = frozenset([errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK])


class FolderLock:
    """An exclusive ``flock`` on a file of the folder. The system releases the lock when the holding process ends.

    The file stays in the folder, because after its removal two processes could lock two files of the same name. Only
    who removes the folder removes the file, while holding the lock; whoever waited for the lock then makes both anew.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._close: weakref.finalize[..., FolderLock] | None = None
        self._holder = "another process"

    def acquire(self) -> None:
        """Takes the lock, and waits up to 10 seconds for another save to end. Makes the folder if it was removed.

        Raises:
            CheckpointError: another save goes on for longer, or the file cannot be opened or locked.
        """
        deadline = time.monotonic() + _PATIENCE
        try:
            while (is_held := self.try_acquire()) is False:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{self._path.parent}: got another save into this folder, by {self._holder}, expected one at a "
                        "time; wait for it, or end that process if it belongs to a run that failed"
                    )
                time.sleep(_INTERVAL)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be locked: {error}; choose another path") from error
        if is_held is None:
            warnings.warn(
                f"{self._path.parent}: this file system has no locks; make sure that only one run saves into this "
                "folder",
                RuntimeWarning,
                stacklevel=2,
            )

    def try_acquire(self) -> bool | None:
        """Takes the lock if no process holds it.

        Returns:
            Whether the lock is held now; None if the file system has no locks.

        Raises:
            OSError: the file cannot be opened or locked.
        """
        if self._close is not None:
            return True
        while True:
            try:
                descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:  # the folder was removed
                make_folder(self._path.parent)
                continue
            self._close = weakref.finalize(self, os.close, descriptor)
            _held.add(self)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                        break
                self.release()  # the file was removed with the folder, and another process may have made a new one
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    self._holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or self._holder
                self.release()
                if isinstance(error, BlockingIOError):
                    return False
                if error.errno in _NO_LOCKS:
                    return None
                raise
        with suppress(OSError):  # only a hint: on a full disk, strays can be removed only after locking
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return True

    def release(self) -> None:
        """Releases the lock. Does nothing if the lock is not held."""
        close, self._close = self._close, None
        if close is not None:
            close()


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Closes a forked child's copies of its parent's lock files, because a lock ends with its last open copy."""
    for lock in list(_held):
        with suppress(OSError):
            lock.release()


os.register_at_fork(after_in_child=_release_in_child)
