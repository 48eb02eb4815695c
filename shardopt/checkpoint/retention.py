"""Removes older checkpoints of a run, which are in folders whose names differ in the number at the end."""

from __future__ import annotations

import re
import warnings

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.folder import Folder
from shardopt.checkpoint.folder_lock import LOCK_NAME
from shardopt.checkpoint.index import INDEX_NAME, is_own_name, load_index

_NUMBERED = re.compile(r"(.*?)([0-9]+)", re.DOTALL)


def check_keep_last(folder: Folder, keep_last: int | None) -> None:
    """Checks the option ``keep_last`` of a save.

    Raises:
        ValueError: it is no positive whole number, or the folder's name does not end with a number.
    """
    if keep_last is None:
        return
    if type(keep_last) is not int or keep_last < 1:
        raise ValueError(f"got keep_last={keep_last!r}, expected a positive whole number, or None to keep all")
    if _NUMBERED.fullmatch(folder.name) is None:
        raise ValueError(
            f"got keep_last={keep_last} for the folder {folder.name!r}, expected a name that ends with a number, such "
            "as step-1000, by which checkpoints follow one another"
        )


def remove_older(folder: Folder, keep_last: int) -> None:
    """Removes checkpoints beside a complete one, whose numbers are smaller, but for the newest ``keep_last - 1``.

    Also removes what earlier removals and failed saves of smaller numbers have left, where no save is under way. Only
    files of checkpoints are removed: a folder with other files stays, with these files, and so does a folder whose
    index cannot be read. A file that cannot be removed is a warning, and left to the next removal.

    Args:
        folder: the folder of the newest checkpoint.
        keep_last: how many checkpoints stay, with that one.
    """
    try:
        kept = 1
        for other in _older(folder):
            names = other.names()
            if INDEX_NAME in names:
                if not _is_checkpoint(other):
                    continue
                kept += 1
                if kept <= keep_last:
                    continue
                other.remove(INDEX_NAME)  # first: without it, what is left is no checkpoint
            elif not any(map(is_own_name, names)) or not other.lock().is_free():
                continue
            for name in other.names():
                if is_own_name(name) or name == LOCK_NAME:
                    other.remove(name)
            other.remove_if_empty()
    except OSError as error:
        warnings.warn(f"{folder}: older checkpoints cannot be removed: {error}", RuntimeWarning, stacklevel=2)


def _is_checkpoint(folder: Folder) -> bool:
    try:
        load_index(folder)
    except CheckpointError:
        return False
    return True


def _older(folder: Folder) -> list[Folder]:
    """The folders beside it with smaller numbers, the newest first."""
    own = _NUMBERED.fullmatch(folder.name)
    assert own is not None
    found = []
    for name, other in folder.siblings().items():
        match = _NUMBERED.fullmatch(name)
        if match and match[1] == own[1] and int(match[2]) < int(own[2]):
            found.append((int(match[2]), name, other))
    return [other for _, _, other in sorted(found, key=lambda item: item[:2], reverse=True)]
