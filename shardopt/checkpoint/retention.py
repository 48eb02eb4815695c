"""Removes older checkpoints of a run, which are in folders whose names differ in the number at the end."""

from __future__ import annotations

import re
import warnings

from shardopt.checkpoint.folder import Folder
from shardopt.checkpoint.folder_lock import LOCK_NAME
from shardopt.checkpoint.index import INDEX_NAME, remove_strays

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

    Only files of checkpoints are removed: a folder with other files stays, with these files. What cannot be removed is
    a warning.

    Args:
        folder: the folder of the newest checkpoint.
        keep_last: how many checkpoints stay, with that one.
    """
    try:
        for other in _older(folder)[keep_last - 1 :]:
            other.remove(INDEX_NAME)  # first: without it, what is left is no checkpoint
            remove_strays(other, ())
            if LOCK_NAME in other.names():
                other.remove(LOCK_NAME)
            other.remove_if_empty()
    except OSError as error:
        warnings.warn(f"{folder}: older checkpoints cannot be removed: {error}", RuntimeWarning, stacklevel=2)


def _older(folder: Folder) -> list[Folder]:
    """The folders of complete checkpoints with smaller numbers, the newest first."""
    own = _NUMBERED.fullmatch(folder.name)
    assert own is not None
    found = []
    for name, other in folder.siblings().items():
        match = _NUMBERED.fullmatch(name)
        if match and match[1] == own[1] and int(match[2]) < int(own[2]) and INDEX_NAME in other.names():
            found.append((int(match[2]), name, other))
    return [other for _, _, other in sorted(found, key=lambda item: item[:2], reverse=True)]
