"""A checkpoint's own files and folder; never reads, writes or waits for a file outside the folder."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from shardopt.checkpoint.retries import retried


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file that lies in the folder itself, and returns its descriptor.

    Args:
        path: the file. The folder may be a symbolic link or lie behind one; the file may not be one.
        flags: the flags for ``os.open``.

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
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "got a symbolic link, expected a file in the folder itself")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "got something else, expected a regular file")
    return found.st_size


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
