"""Finds the folder of a checkpoint by its path or URL."""

from __future__ import annotations

import os
from pathlib import Path

from shardopt.checkpoint.folder import Folder, PathLike
from shardopt.checkpoint.local_folder import LocalFolder
from shardopt.checkpoint.object_store import ObjectFolder


def folder_at(path: PathLike) -> Folder:
    """The folder with this path or URL.

    Raises:
        TypeError: the argument is no path.
        CheckpointError: the URL is of an object store, and the package fsspec, or one that it needs, is not installed.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"got {type(path).__name__} for a path, expected text or os.PathLike; give the path first: "
            "shardopt.checkpoint.save(path, model, optimizer), load(path, model, optimizer)"
        )
    text = os.fspath(path)
    for local in ("file://", "local://"):
        if text.startswith(local):
            return LocalFolder(Path(text.removeprefix(local)))
    if "://" in text:
        return ObjectFolder(text)
    return LocalFolder(Path(text))
