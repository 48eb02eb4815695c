"""A file or folder that appears under its name when it is complete."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.storage import LOCK_NAME, folder_at, sync_folder

_CONTENT = "content"


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A path to write to, which gets the target's name at the end, durably; after an error nothing is left.

    The path lies in a folder beside the target, ``<target>.<8 digits>.unfinished``, which is locked. A process that is
    killed leaves the folder, and the next one for this target removes it.

    Raises:
        CheckpointError: the system fails to write.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.iterdir():
            if re.fullmatch(re.escape(target.name) + r"\.[0-9a-f]{8}\.unfinished", left.name) and _is_folder(left):
                with suppress(OSError, CheckpointError):  # another user's, or locked
                    _remove_if_free(left)
        folder = target.with_name(f"{target.name}.{secrets.token_hex(4)}.unfinished")
        folder.mkdir()
        release = None
        try:
            release = folder_at(folder).lock(10.0)
            yield folder / _CONTENT
            os.replace(folder / _CONTENT, target)
            sync_folder(target.parent)
        finally:
            _remove(folder)
            if release is not None:
                release()
    except OSError as error:
        raise CheckpointError(
            f"{target}: got {error} while writing, expected room for it; choose another path"
        ) from error


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove_if_free(folder: Path) -> None:
    release = folder_at(folder).lock(0)
    if release is not None:  # an owner that has just made the folder waits for the lock, and makes the folder again
        try:
            _remove(folder)
        finally:
            release()


def _remove(folder: Path) -> None:
    """Removes a working folder, but no files of others in it."""
    content = folder / _CONTENT
    if _is_folder(content):
        shutil.rmtree(content, ignore_errors=True)
    for path in (content, folder / LOCK_NAME):
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        folder.rmdir()
