"""Opens a checkpoint's own files; never reads, writes or waits for a file outside the folder."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


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
