"""The folder of a checkpoint in an object store, by any URL that the package fsspec opens.

In a store, an object appears whole when its upload ends, and replaces another of its name at once: so
``checkpoint.json``, written last, is the point of no return, as its rename is on a file system. There are no locks.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.folder import Folder, Lock, SourceFile, TargetFile, retried

T = TypeVar("T")

#: Of stores in which an upload replaces an object at once when it ends. In others, such as sftp, a file is renamed.
_PROTOCOLS = frozenset(
    ["s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "ocilake", "oss", "obs", "memory", "hf", "r2"]
)


class ObjectFolder:
    """The objects whose names begin with a URL.

    Args:
        url: such as ``s3://bucket/runs/step-1000``.

    Raises:
        CheckpointError: fsspec, or the package for this kind of URL, is not installed, or it refuses the URL.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise CheckpointError(
                f"{url}: got a URL, which needs the package fsspec; install shardopt[object-stores]"
            ) from error
        try:
            fs, path = url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{url}: cannot be opened: {error}") from error
        self._fs: Any = fs
        self._path: str = path.rstrip("/")

    def __str__(self) -> str:
        return self._url

    def shown(self, name: str) -> str:
        return f"{self._url}/{name}"

    def exists(self) -> bool:
        return bool(self.names())

    def make(self) -> None:
        with _os_errors():
            self._fs.makedirs(self._path, exist_ok=True)  # only some stores have folders

    def names(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            with _os_errors():
                paths = self._fs.ls(self._path, detail=False)
        except OSError:  # as of LocalFolder, where they cannot be listed
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def read(self, name: str) -> bytes:
        return self._retried(lambda: bytes(self._fs.cat_file(f"{self._path}/{name}")))

    def size(self, name: str) -> int:
        def work() -> int:
            self._fs.invalidate_cache()
            return int(self._fs.size(f"{self._path}/{name}"))

        return self._retried(work)

    def modified(self, name: str) -> float | None:
        with suppress(Exception):  # only some stores tell
            self._fs.invalidate_cache()
            return float(self._fs.modified(f"{self._path}/{name}").timestamp())
        return None

    def open(self, name: str) -> SourceFile:
        self.size(name)  # raises if there is no such object
        return _Source(self, f"{self._path}/{name}")

    def create(self, name: str) -> TargetFile:
        with _os_errors():
            return _Target(self._fs.open(f"{self._path}/{name}", "wb"))

    def put(self, name: str, unfinished: str, data: bytes) -> None:
        if _PROTOCOLS.isdisjoint([self._fs.protocol] if isinstance(self._fs.protocol, str) else self._fs.protocol):
            self._retried(lambda: self._fs.pipe_file(f"{self._path}/{unfinished}", data))
            self._retried(lambda: self._fs.mv(f"{self._path}/{unfinished}", f"{self._path}/{name}"))
        else:
            self._retried(lambda: self._fs.pipe_file(f"{self._path}/{name}", data))

    def remove(self, name: str) -> None:
        with _os_errors():
            self._fs.rm_file(f"{self._path}/{name}")

    def remove_if_empty(self) -> None:
        with suppress(Exception):  # only some stores have folders
            self._fs.rmdir(self._path)

    def siblings(self) -> dict[str, Folder]:
        parent = self._fs._parent(self._path)
        self._fs.invalidate_cache()
        with _os_errors():
            paths = [str(path).rstrip("/") for path in self._fs.ls(parent, detail=False)]
        return {path.rpartition("/")[2]: ObjectFolder(self._fs.unstrip_protocol(path)) for path in paths}

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    def lock(self) -> Lock:
        return _NoLock()

    def range(self, path: str, start: int, end: int) -> bytes:
        """Bytes of an object."""
        return self._retried(lambda: bytes(self._fs.cat_file(path, start=start, end=end)))

    def _retried(self, work: Callable[[], T]) -> T:
        def attempt() -> T:
            with _os_errors():
                return work()

        return retried(attempt)


class _Source:
    def __init__(self, folder: ObjectFolder, path: str) -> None:
        self._folder, self._path = folder, path

    def read_into(self, buffer: memoryview, position: int) -> int:
        data = self._folder.range(self._path, position, position + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Does nothing: nothing is open."""


class _Target:
    def __init__(self, file: Any) -> None:
        self._file, self._end = file, 0

    def write(self, data: memoryview, position: int) -> None:
        with _os_errors():
            self._file.write(bytes(position - self._end))
            self._file.write(data)
        self._end = position + len(data)

    def finish(self) -> None:
        with _os_errors():
            self._file.close()

    def abort(self) -> None:
        with suppress(Exception):
            self._file.discard()
            self._file.closed = True  # otherwise it would be uploaded when the object is deleted


class _NoLock:
    def acquire(self) -> None:
        """Does nothing."""

    def release(self) -> None:
        """Does nothing."""

    def try_acquire(self) -> None:
        """Nobody knows."""


@contextmanager
def _os_errors() -> Iterator[None]:
    """Turns the errors of the stores' packages into OSError, which may pass."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # each store's package has errors of its own, with no common class
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
