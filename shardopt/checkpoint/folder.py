"""The folder of a checkpoint, on a file system of this machine; object stores have :mod:`.object_store`."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from shardopt.checkpoint.folder_lock import FolderLock
from shardopt.checkpoint.own_files import open_own, own_size
from shardopt.checkpoint.retries import retried

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
    """Against two saves into one folder at a time; see :class:`FolderLock`."""

    def acquire(self) -> None: ...

    def release(self) -> None: ...


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
        """Folders in the same place, this one included, by name."""

    @property
    def name(self) -> str:
        """The last part of the path."""

    def lock(self) -> Lock:
        """A lock for saves into this folder."""


def folder_at(path: PathLike) -> Folder:
    """The folder with this path or URL.

    Raises:
        CheckpointError: the URL is of an object store, and the package fsspec, or one that it needs, is not installed.
    """
    text = os.fspath(path)
    if "://" in text:
        from shardopt.checkpoint.object_store import ObjectFolder

        return ObjectFolder(text)
    return LocalFolder(Path(text))


class LocalFolder:
    """A folder on a file system."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def shown(self, name: str) -> str:
        return str(self._path / name)

    def exists(self) -> bool:
        return os.path.isdir(self._path)

    def make(self) -> None:
        missing = [path for path in (self._path, *self._path.parents) if not os.path.exists(path)]
        self._path.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)

    def names(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except OSError:  # files that cannot be listed do not matter here
            return []

    def read(self, name: str) -> bytes:
        def work() -> bytes:
            with open(open_own(self._path / name), "rb") as file:
                return file.read()

        return retried(work)

    def size(self, name: str) -> int:
        return retried(lambda: own_size(self._path / name))

    def open(self, name: str) -> SourceFile:
        return _LocalSource(retried(lambda: open_own(self._path / name)))

    def create(self, name: str) -> TargetFile:
        return _LocalTarget(self._path / name)

    def put(self, name: str, unfinished: str, data: bytes) -> None:
        path = self._path / unfinished
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            path.replace(self._path / name)
        except BaseException as error:
            if not isinstance(error, FileExistsError):
                with suppress(OSError):
                    path.unlink()
            raise
        sync_folder(self._path)

    def remove(self, name: str) -> None:
        (self._path / name).unlink()

    def remove_if_empty(self) -> None:
        with suppress(OSError):
            self._path.rmdir()

    def siblings(self) -> dict[str, Folder]:
        return {path.name: LocalFolder(path) for path in Path(os.path.abspath(self._path)).parent.iterdir()}

    @property
    def name(self) -> str:
        return Path(os.path.abspath(self._path)).name

    def lock(self) -> Lock:
        return FolderLock(self._path)


class _LocalSource:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_into(self, buffer: memoryview, position: int) -> int:
        return retried(lambda: os.preadv(self._descriptor, [buffer], position))

    def close(self) -> None:
        os.close(self._descriptor)


class _LocalTarget:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb", buffering=0)

    def write(self, data: memoryview, position: int) -> None:
        while len(data):
            written = os.pwrite(self._file.fileno(), data, position)
            data, position = data[written:], position + written

    def finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        sync_folder(self._path.parent)

    def abort(self) -> None:
        self._file.close()
        with suppress(OSError):
            self._path.unlink()


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, on file systems that support that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
