"""Removes what failed saves left, and older checkpoints of a run, whose folders differ in the number at the end."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.index import INDEX_NAME, is_own_name, load_index
from shardopt.checkpoint.storage import LOCK_NAME, Folder

_A_DAY = 86400.0  # seconds: ranks wait for each other for minutes, so that the data of a save are of about one time
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


def remove_strays(folder: Folder, keep: Collection[str]) -> None:
    """Removes files of earlier and of failed saves: files that have this format's names and are not in `keep`.

    Leaves files that cannot be removed to the next save.
    """
    for name in folder.names():
        if is_own_name(name) and name not in keep:
            with suppress(OSError):
                folder.remove(name)


def remove_older(folder: Folder, keep_last: int) -> None:
    """Removes checkpoints beside a complete one, whose numbers are smaller, but for the newest ``keep_last - 1``.

    Also removes what earlier removals and failed saves of smaller numbers have left, empty folders included, where no
    save is under way: nobody holds the lock or, where there are no locks, no file was added for a day. Only files of
    checkpoints are removed: a folder with other files stays, with these files, and so does a folder whose index cannot
    be read. A file that cannot be removed is a warning, and left to the next removal.
    """
    kept = 1
    with _warning(folder):
        for other in _older(folder):
            with _warning(other):
                names = other.names()
                if INDEX_NAME in names and not _is_checkpoint(other):
                    continue
                kept += INDEX_NAME in names
                if kept > keep_last or INDEX_NAME not in names:
                    _remove(other, names, folder)


def _remove(other: Folder, names: Sequence[str], newest: Folder) -> None:
    """Removes a checkpoint, or what is left of one, unless a save into its folder is under way."""
    if names and not any(is_own_name(name) or name in (INDEX_NAME, LOCK_NAME) for name in names):
        return
    try:
        release = other.lock(patience=0)
    except CheckpointError:
        return
    if release is None and INDEX_NAME not in names and not _is_abandoned(other, names, newest):
        return
    try:
        present = set(other.names())
        if INDEX_NAME in present:
            if INDEX_NAME not in names:
                return  # another save completed it meanwhile
            other.remove(INDEX_NAME)  # first: without it, what is left is no checkpoint
        for name in filter(is_own_name, present.intersection(names)):  # no new ones, where there are no locks
            other.remove(name)
        if LOCK_NAME in present:
            other.remove(LOCK_NAME)
        other.remove_if_empty()
    finally:
        if release is not None:
            release()


@contextmanager
def _warning(folder: Folder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warnings.warn(f"{folder}: older checkpoints cannot be removed: {error}", RuntimeWarning, stacklevel=4)


def _is_abandoned(other: Folder, names: Sequence[str], newest: Folder) -> bool:
    """Whether all data were complete a day before the newest checkpoint, by the clock of their store."""
    now = newest.modified(INDEX_NAME)
    times = [other.modified(name) for name in names if is_own_name(name)]
    return bool(times) and now is not None and all(time is not None and now - time > _A_DAY for time in times)


def _is_checkpoint(folder: Folder) -> bool:
    try:
        load_index(folder)
    except CheckpointError:
        return False
    return True


def _older(folder: Folder) -> list[Folder]:
    """The folders beside it with smaller numbers, the newest first."""
    newest = _NUMBERED.fullmatch(folder.name)
    assert newest is not None
    older = []
    for other in folder.siblings():
        match = _NUMBERED.fullmatch(other.name)
        if match and match[1] == newest[1] and int(match[2]) < int(newest[2]):
            older.append((int(match[2]), other.name, other))
    return [other for _, _, other in sorted(older, key=lambda item: item[:2], reverse=True)]
