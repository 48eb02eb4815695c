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
        CheckpointError: the URL is of an object store, and the package fsspec, or one that it needs, is not installed.
    """
    text = os.fspath(path)
    for local in ("file://", "local://"):
        if text.startswith(local):
            return LocalFolder(Path(text.removeprefix(local)))
    if "://" in text:
        return ObjectFolder(text)
    return LocalFolder(Path(text))
