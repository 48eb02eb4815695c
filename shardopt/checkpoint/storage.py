"""File operations in the folder of a checkpoint: on a file system, or at any URL that the package fsspec opens.

Errors of the system and of stores are OSError. Nothing is retried here: a save or load that fails changes nothing, so
that the caller can repeat it, and fsspec's packages for object stores retry requests by themselves.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardopt.checkpoint.errors import CheckpointError

LOCK_NAME = "checkpoint.lock"

#: Protocols of stores in which an upload replaces an object at once when it ends. In others, such as sftp, the upload
#: gets another name first, and is renamed.
_ATOMIC_UPLOADS = frozenset(
    ["s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "ocilake", "oss", "obs", "memory", "hf", "r2"]
)
_NO_LOCKS = frozenset([errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK])

PathLike = str | os.PathLike[str]
#: Writes bytes at a position of a file, in ascending order of positions; gaps between them are zeros.
Write = Callable[[memoryview, int], None]
#: Reads bytes from a position of a file into a buffer; returns how many, perhaps fewer than fit; 0 at the file's end.
Read = Callable[[memoryview, int], int]


@contextmanager
def _os_errors() -> Iterator[None]:
    """Turns any exception of an fsspec package into an OSError, as their exceptions have no common base class."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of a store's package
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


class Folder:
    """A checkpoint's folder in an object store or the like, through fsspec; :class:`LocalFolder` overrides for disks.

    In an object store an object appears whole when its upload ends, and replaces another of its name at once. So the
    upload of ``checkpoint.json`` commits a save, as its rename does on a file system.

    Args:
        fs: fsspec's file system object.
        path: the folder's path in ``fs``.
        shown: the folder's path or URL for errors.
    """

    def __init__(self, fs: Any, path: str, shown: str) -> None:
        self._fs, self._path, self._shown = fs, path, shown

    def __str__(self) -> str:
        return self._shown

    def path_of(self, name: str) -> str:
        """A file's path, for errors."""
        return f"{self._shown}/{name}"

    @property
    def name(self) -> str:
        """The folder's own name: the last part of its path."""
        return self._path.rpartition("/")[2]

    @_os_errors()
    def make(self) -> None:
        """Makes the folder and its missing parents, durably (fsync): they survive a crash of the machine."""
        self._fs.makedirs(self._path, exist_ok=True)  # only some stores have folders

    def names(self) -> list[str]:
        """The names of the files in the folder; none if they cannot be listed, as if the folder was empty."""
        with suppress(OSError), _os_errors():
            self._fs.invalidate_cache()
            return [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._path, detail=False)]
        return []

    @_os_errors()
    def siblings(self) -> list[Folder]:
        """All folders in this folder's parent folder, including this one, but no symbolic links."""
        self._fs.invalidate_cache()
        entries = self._fs.ls(self._fs._parent(self._path), detail=True)
        paths = [e["name"].rstrip("/") for e in entries if e["type"] == "directory" and not e.get("islink")]
        shown = self._shown.removesuffix(self.name)
        return [type(self)(self._fs, path, shown + path.rpartition("/")[2]) for path in paths]

    @_os_errors()
    def size(self, name: str) -> int:
        """The length in bytes of a regular file that lies in the folder itself, not behind a link."""
        self._fs.invalidate_cache()
        info = self._fs.info(self._fs_path(name))
        if info["type"] != "file" or info.get("islink"):
            got = "a symbolic link" if info.get("islink") else "something else"
            raise OSError(errno.EINVAL, f"got {got}, expected a regular file in the folder itself")
        return int(info["size"])

    @contextmanager
    def reading(self, name: str) -> Iterator[Read]:
        """Opens a file, which several threads may read until the end of the context."""

        @_os_errors()
        def read(buffer: memoryview, position: int) -> int:
            data = self._fs.cat_file(self._fs_path(name), start=position, end=position + len(buffer))
            buffer[: len(data)] = data
            return len(data)

        yield read

    @_os_errors()
    def read(self, name: str) -> bytes:
        """Reads a small file whole."""
        return bytes(self._fs.cat_file(self._fs_path(name)))

    @contextmanager
    def writing(self, name: str) -> Iterator[Write]:
        """Makes a new file, which is complete and durable at the end of the context, and is removed after an error."""
        with _os_errors():
            file = self._fs.open(self._fs_path(name), "wb")
        end = 0

        @_os_errors()
        def write(data: memoryview, position: int) -> None:
            nonlocal end
            file.write(bytes(position - end))
            file.write(data)
            end = position + len(data)

        try:
            yield write
            with _os_errors():
                file.close()
        except BaseException:
            with suppress(Exception):
                file.discard()
                file.closed = True  # otherwise it would be uploaded when it is garbage-collected
            raise

    @_os_errors()
    def replace(self, name: str, temporary: str, data: bytes) -> None:
        """Replaces a file atomically and durably; ``temporary`` is the name of the temporary file."""
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else {*self._fs.protocol}
        if protocols & _ATOMIC_UPLOADS:
            self._fs.pipe_file(self._fs_path(name), data)
        else:
            self._fs.pipe_file(self._fs_path(temporary), data)
            self._fs.mv(self._fs_path(temporary), self._fs_path(name))

    @_os_errors()
    def remove(self, name: str) -> None:
        """Removes a file."""
        self._fs.rm_file(self._fs_path(name))

    def remove_if_empty(self) -> None:
        """Removes the folder if it is empty; any failure is ignored."""
        with suppress(Exception):  # only some stores have folders
            self._fs.rmdir(self._path)

    def lock(self, patience: float) -> Callable[[], None] | None:
        """Locks the folder for one save, and makes it again if another run has just removed it.

        Waits ``patience`` seconds for another save, then raises CheckpointError. Returns a function that unlocks the
        folder (as the end of the process does); None if the storage has no locks. Raises OSError if it cannot be
        locked.
        """
        return None

    def _fs_path(self, name: str) -> str:
        """A file's path for the file system object."""
        return f"{self._path}/{name}"


class LocalFolder(Folder):
    """A folder on a file system. The folder may be a symbolic link; links in place of its files are refused."""

    def make(self) -> None:
        path = Path(self._path)
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        while not path.is_dir():
            try:
                path.mkdir(parents=True, exist_ok=True)
            except FileExistsError:  # another run may remove the folder and make it again between two system calls
                with suppress(FileNotFoundError):
                    if not stat.S_ISDIR(path.lstat().st_mode):
                        raise
                if any(folder.is_symlink() and not folder.exists() for folder in path.parents):
                    raise
        for folder in missing:
            sync_folder(folder.parent)

    @contextmanager
    def reading(self, name: str) -> Iterator[Read]:
        descriptor = self._open(name)
        try:
            yield lambda buffer, position: os.preadv(descriptor, [buffer], position)
        finally:
            os.close(descriptor)

    def read(self, name: str) -> bytes:
        with open(self._open(name), "rb") as file:
            return file.read()

    def _open(self, name: str) -> int:
        """Opens a regular file to be read; returns its descriptor."""
        self.size(name)  # raises if it is a link or a pipe
        return os.open(self._fs_path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)

    @contextmanager
    def writing(self, name: str) -> Iterator[Write]:
        descriptor = os.open(self._fs_path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

        def write(data: memoryview, position: int) -> None:
            while len(data):
                written = os.pwrite(descriptor, data, position)
                data, position = data[written:], position + written

        try:
            try:
                yield write
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            with suppress(OSError):
                self.remove(name)
            raise
        sync_folder(Path(self._path))

    def replace(self, name: str, temporary: str, data: bytes) -> None:
        with self.writing(temporary) as write:
            write(memoryview(data), 0)
        try:
            os.replace(self._fs_path(temporary), self._fs_path(name))
        except BaseException:
            with suppress(OSError):
                self.remove(temporary)
            raise
        sync_folder(Path(self._path))

    def lock(self, patience: float) -> Callable[[], None] | None:
        """See :meth:`Folder.lock`. Warns if the file system has no locks.

        Unlocking leaves the lock's file: if it were removed, two processes could lock two files of the same name. Only
        the removal of an old checkpoint removes the file, while it holds the lock.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self._fs_path(LOCK_NAME), timeout=patience, thread_local=False, fallback_to_soft=False)
        while True:
            try:
                lock.acquire()
                return lock.release
            except Timeout:
                raise CheckpointError(
                    f"{self}: got another save into this folder, expected one at a time; wait for it, or end that "
                    "process if it belongs to a run that failed"
                ) from None
            except (FileNotFoundError, FileExistsError):  # filelock's own mkdir has the race of `make`
                self.make()
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                text = f"{self}: this file system has no locks; make sure that only one run saves into this folder"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                return None


def folder_at(path: PathLike) -> Folder:
    """Makes a Folder for a path or URL, on a file system or in a store.

    Raises TypeError if it is no path, CheckpointError if no installed package opens the URL or the machine is
    big-endian.
    """
    from fsspec.core import url_to_fs  # not at the top: importing it takes as long as importing this package
    from fsspec.implementations.local import LocalFileSystem

    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"got {type(path).__name__} for a path, expected text or os.PathLike; give the path first: "
            "shardopt.checkpoint.save(path, model, optimizer), load(path, model, optimizer)"
        )
    if sys.byteorder != "little":
        raise CheckpointError("got a big-endian machine, expected a little-endian one, in whose byte order files are")
    text = os.fspath(path).removeprefix("file://").removeprefix("local://")
    if "://" not in text:
        return LocalFolder(LocalFileSystem(), os.path.abspath(text), os.path.abspath(text))
    try:
        fs, found = url_to_fs(text.rstrip("/"))
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{text}: cannot be opened: {error}") from None
    return Folder(fs, found.rstrip("/"), text.rstrip("/"))


def sync_folder(folder: Path) -> None:
    """Makes new and renamed entries of a folder durable (fsync), on file systems that support that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
