"""The interface of the folder of a checkpoint, on a file system or in an object store."""

from __future__ import annotations

import os
from typing import Protocol

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
        """Puts a file with this content in place of one of this name, at once and durably.

        Args:
            name: the file's name.
            unfinished: a name that the file may have before.
            data: its content.
        """

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
