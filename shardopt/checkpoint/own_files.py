"""Opens a checkpoint's own files: nothing outside the folder is read, written or waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file that lies in the folder itself, and gives its descriptor.

    Args:
        path: of the file; only the folder may be a symbolic link, or lie behind one.
        flags: of ``os.open``.

    Raises:
        OSError: the system refused, or there is something else, such as a symbolic link or a pipe.
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
    """The bytes of a file that :func:`open_own` opens.

    Raises:
        OSError: there is no such file.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "got a symbolic link, expected a file in the folder itself")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "got something else, expected a regular file")
    return found.st_size
