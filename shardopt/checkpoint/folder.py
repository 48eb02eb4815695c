"""The interface of the folder of a checkpoint, on a file system or in an object store; and how files are opened.

Functions for the local file system never read, write or wait for a file outside the folder.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")

_PAUSES = (0.1, 0.3, 1.0)  # seconds before each further attempt
_TRANSIENT = frozenset(
    [
        *(errno.EAGAIN, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY),
        *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET),
        *(errno.ENETRESET, errno.ENETUNREACH, errno.EHOSTDOWN),
    ]
)

PathLike = str | os.PathLike[str]


class SourceFile(Protocol):
    """A file that is open for reading, by several threads."""

    def read_into(self, buffer: memoryview, position: int) -> int:
        """Reads bytes from a position on, as many as there are and fit; returns how many, 0 at the end."""

    def close(self) -> None: ...


class TargetFile(Protocol):
    """A new file that is being written, from its beginning to its end."""

    def write(self, data: memoryview, position: int) -> None:
        """Writes bytes at a position that is not before the end of what was written."""

    def finish(self) -> None:
        """Makes the file durable."""

    def abort(self) -> None:
        """Removes the file, as far as that is possible."""


class Lock(Protocol):
    """Against two saves into one folder at a time; see :class:`shardopt.checkpoint.folder_lock.FolderLock`."""

    def acquire(self) -> None: ...

    def release(self) -> None: ...

    def try_acquire(self) -> bool | None:
        """Takes the lock if no save holds it; returns whether it is held now, None where there are no locks."""


class Folder(Protocol):
    """Where a checkpoint is. Errors of the system are OSError."""

    def __str__(self) -> str: ...

    def shown(self, name: str) -> str:
        """A file's path, for errors."""

    def exists(self) -> bool:
        """Whether there is such a folder."""

    def make(self) -> None:
        """Makes the folder and its missing parents, durably: a crash does not undo that."""

    def names(self) -> list[str]:
        """The names of the files in it; none if they cannot be listed."""

    def read(self, name: str) -> bytes:
        """All of a small file."""

    def size(self, name: str) -> int:
        """A file's length in bytes."""

    def modified(self, name: str) -> float | None:
        """When a file was completed, in seconds by the clock of the store; None if the store does not say."""

    def open(self, name: str) -> SourceFile:
        """Opens a file."""

    def create(self, name: str) -> TargetFile:
        """Begins a file, which must not exist."""

    def put(self, name: str, unfinished: str, data: bytes) -> None:
        """Puts a file in place of one of this name, at once and durably; it may be named ``unfinished`` before."""

    def remove(self, name: str) -> None:
        """Removes a file."""

    def remove_if_empty(self) -> None:
        """Removes the folder if nothing is in it."""

    def siblings(self) -> dict[str, Folder]:
        """Folders in the same place, this one included, by name. Links to folders are none of them."""

    @property
    def name(self) -> str:
        """The last part of the path."""

    def lock(self) -> Lock:
        """A lock for saves into this folder."""


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


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file that lies in the folder itself, and returns its descriptor.

    The folder may be a symbolic link or lie behind one; the file may not be one.

    Raises:
        OSError: the file cannot be opened, or is no regular file but, for example, a symbolic link or a pipe.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "got a symbolic link, expected a file in the folder itself") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "got something else, expected a regular file")
    return descriptor


def own_size(path: Path) -> int:
    """The size in bytes of a file that :func:`open_own` would open.

    Raises:
        OSError: the file does not exist, or is no regular file but, for example, a symbolic link or a pipe.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "got a symbolic link, expected a file in the folder itself")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "got something else, expected a regular file")
    return status.st_size


def make_folder(path: Path) -> None:
    """Makes a folder and its missing parents, durably.

    Raises:
        OSError: the folder cannot be made.
    """
    while True:
        missing = [folder for folder in (path, *path.parents) if not os.path.exists(folder)]
        try:
            retried(lambda: path.mkdir(parents=True, exist_ok=True))
            break
        except FileExistsError:
            if os.path.lexists(path):
                raise
            # Another run removed the folder between two system calls of mkdir.
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, on file systems that support that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
