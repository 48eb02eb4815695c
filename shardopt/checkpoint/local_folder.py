"""The folder of a checkpoint on a file system."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from shardopt.checkpoint.folder import (
    Folder,
    Lock,
    SourceFile,
    TargetFile,
    make_folder,
    open_own,
    own_size,
    retried,
    sync_folder,
)
from shardopt.checkpoint.folder_lock import FolderLock


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
        make_folder(self._path)

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

    def modified(self, name: str) -> float | None:
        return (self._path / name).lstat().st_mtime

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
        paths = Path(os.path.abspath(self._path)).parent.iterdir()
        return {path.name: LocalFolder(path) for path in paths if path.is_dir() and not path.is_symlink()}

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
            written = retried(partial(os.pwrite, self._file.fileno(), data, position))
            data, position = data[written:], position + written

    def finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        sync_folder(self._path.parent)

    def abort(self) -> None:
        self._file.close()
        with suppress(OSError):
            self._path.unlink()
