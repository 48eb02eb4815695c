"""Saves tensors as a portable checkpoint, into a folder or an object store.

A checkpoint is a folder of data files and ``checkpoint.json`` (:mod:`shardopt.checkpoint.index`), which one rename puts
in place once all data are on the disk. Until then the previous checkpoint stays loadable, even if a rank
dies. A load verifies the checksums of all bytes before use. All ranks must see the folder. Only one save at a time
writes into the folder: the first rank holds ``checkpoint.lock``. Afterwards, older checkpoints of the run may be
removed: folders beside this one whose names differ in the number at the end.
"""

from __future__ import annotations

import logging
import re
import secrets
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256

from shardopt.checkpoint.contents import Contents
from shardopt.checkpoint.data_file import check_lengths, write_data_file
from shardopt.checkpoint.errors import CheckpointError, LostRanksError
from shardopt.checkpoint.header import to_json
from shardopt.checkpoint.index import INDEX_NAME, Index, StoredFile, data_file_name, dump_index, is_own_name, load_index
from shardopt.checkpoint.plan import Plan, Planning
from shardopt.checkpoint.ranks import Ranks
from shardopt.checkpoint.replicas import check_replicas, replica_digests
from shardopt.checkpoint.storage import LOCK_NAME, Folder
from shardopt.checkpoint.wording import few

_logger = logging.getLogger("shardopt")
_NUMBERED = re.compile(r"(.*?)([0-9]+)", re.DOTALL)
_PATIENCE = 10.0  # seconds to wait for the lock: a killed process may take some time to end


def write_checkpoint(folder: Folder, keep_last: int | None, collect: Callable[[], Contents], ranks: Ranks) -> None:
    """Writes a checkpoint into a folder, which is made if necessary, and replaces the checkpoint that is there.

    All ranks must call this, and agree on success four times: once tensors are described, the folder is locked, data
    files are written, and the index is written. The header is the first rank's, with the ``param_groups`` of all ranks.
    ``collect`` is called once. After any error on any rank all ranks raise, and nothing was changed: a CheckpointError
    if writing fails, ranks hold different tensors by one name, or another save goes on, or the error of ``collect``.
    """

    def described() -> tuple[Planning, bytes]:
        check_keep_last(folder, keep_last)
        planning = Planning(collect(), ranks)
        return planning, planning.message

    with ExitStack() as lock:
        planning, messages = ranks.exchange(described)
        contents, plan = planning.contents, planning.plan(messages)
        digest = sha256(to_json(contents.header["extra"]).encode()).digest()
        _, tokens = ranks.exchange(lambda: (None, digest + _prepare_folder(folder, ranks.rank, lock)))
        token = tokens[0][32:].decode()
        if ranks.rank == 0 and any(each[:32] != digest for each in tokens):
            text = "save got extra values that differ between ranks (of %s), and saves rank 0's; gather them before"
            _logger.warning(text, few(contents.header["extra"]))
        name = data_file_name(token, ranks.rank)
        try:
            written = ranks.all_gather_numbers(lambda: _write(folder, name, plan, contents, ranks.rank))
            check_replicas(plan.replicated, [numbers[3:] for numbers in written], contents.tensors, ranks)
            header = dict(contents.header)
            if plan.param_groups is not None:
                header["param_groups"] = plan.param_groups
            files = [StoredFile(*numbers[:3]) if numbers[1] else None for numbers in written]
            index = Index(header, token, files, plan.tensors)
            ranks.agree(lambda: _commit(folder, index) if ranks.rank == 0 else None)
        except LostRanksError:
            # Keep this rank's file: the first rank may still commit. If it does not, the next save removes the file.
            raise
        except BaseException:  # on all ranks
            with suppress(Exception):  # the first error matters; the next save removes what stays
                # The error may have come after the commit: the index then lists this rank's file.
                in_use = _files_in_use(folder) if plan.own else None
                if in_use is not None and name not in in_use:
                    folder.remove(name)
            raise
    if keep_last is not None and ranks.rank == 0:
        remove_older(folder, keep_last)


def _prepare_folder(folder: Folder, rank: int, lock: ExitStack) -> bytes:
    """Makes the folder. The first rank locks it until ``lock`` ends, cleans it, and returns a token for file names."""
    try:
        folder.make()
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot make this folder: {error}; choose another path") from None
    if rank:
        return b""
    try:
        unlock = folder.lock(_PATIENCE)
    except OSError as error:
        raise CheckpointError(f"{folder.path_of(LOCK_NAME)}: cannot be locked: {error}; choose another path") from None
    if unlock is not None:
        lock.callback(unlock)
    in_use = _files_in_use(folder)
    if in_use is not None:
        remove_strays(folder, in_use)  # a save that failed on a full disk may have left files
    return secrets.token_hex(8).encode()


def _write(folder: Folder, name: str, plan: Plan, contents: Contents, rank: int) -> list[int]:
    """Writes this rank's data file, if any; returns the fields of its StoredFile, then the digests of replicas."""
    own_digests = replica_digests(plan.replicated, contents.tensors, rank)
    if not plan.own:
        return [0, 0, 0, *own_digests]
    with _write_errors(folder, name, sum(data.nbytes for _, _, data in plan.own)):
        return [*write_data_file(folder, name, plan.own), *own_digests]


def _commit(folder: Folder, index: Index) -> None:
    """Writes the index, which replaces the previous checkpoint by the new one, and removes that one's data files."""
    check_lengths(folder, index, [number for number, stored in enumerate(index.files) if stored is not None])
    text = dump_index(index)
    with _write_errors(folder, INDEX_NAME, len(text)):
        folder.replace(INDEX_NAME, f"{INDEX_NAME}.{index.token}", text)
    remove_strays(folder, index.file_names)


@contextmanager
def _write_errors(folder: Folder, name: str, nbytes: int) -> Iterator[None]:
    """Turns an OSError while the file ``name`` is written into a CheckpointError that says what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder.path_of(name)}: cannot write {nbytes} bytes: {error.strerror or error}; make room or "
            "choose another path. The previous checkpoint in this folder, if there was one, is as it was"
        ) from None


def _files_in_use(folder: Folder) -> list[str] | None:
    """The data files of the checkpoint in the folder, empty if there is none; None if its index cannot be read."""
    try:
        return load_index(folder).file_names
    except CheckpointError as error:
        return [] if isinstance(error.__context__, FileNotFoundError) else None


def check_keep_last(folder: Folder, keep_last: int | None) -> None:
    """Raises ValueError unless ``keep_last`` is None, or positive and the folder's name ends with a number."""
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
    """Removes files of replaced checkpoints and failed saves: those with names that saves give and not in `keep`.

    Leaves files that cannot be removed to the next save.
    """
    for name in folder.names():
        if is_own_name(name) and name not in keep:
            with suppress(OSError):
                folder.remove(name)


def remove_older(folder: Folder, keep_last: int) -> None:
    """Removes older checkpoints, in folders with smaller numbers beside this one, except the newest ``keep_last - 1``.

    On file systems with locks, also removes what failed saves and interrupted removals have left in such folders, and
    empty ones, unless another process holds the folder's lock. Only files of checkpoints are removed: a folder with
    other files stays, with these files, and so does a folder whose index cannot be read. A file that cannot be removed
    causes a warning, and is left to the next removal.
    """
    kept = 1  # the new checkpoint
    with _errors_as_warnings(folder):
        for other in _older_folders(folder):
            with _errors_as_warnings(other):
                names = other.names()
                if INDEX_NAME in names:
                    try:
                        load_index(other)
                    except CheckpointError:
                        continue
                    kept += 1
                if kept > keep_last or INDEX_NAME not in names:
                    _remove_checkpoint(other, names)


def _remove_checkpoint(other: Folder, names: Sequence[str]) -> None:
    """Removes a checkpoint or leftovers of one, if the folder's lock is free; ``names``: its files when last listed."""
    if names and not any(is_own_name(name) or name in (INDEX_NAME, LOCK_NAME) for name in names):
        return  # no checkpoint's folder
    try:
        unlock = other.lock(patience=0)
    except CheckpointError:
        return
    if unlock is None and INDEX_NAME not in names:
        return  # no locks: another run may be saving there
    with ExitStack() as lock:
        if unlock is not None:
            lock.callback(unlock)
        present = set(other.names())
        if INDEX_NAME in present:
            if INDEX_NAME not in names:
                return  # another save completed it meanwhile
            other.remove(INDEX_NAME)  # first: without it, what is left is no checkpoint
        for name in filter(is_own_name, present.intersection(names)):  # without locks, a save may add files meanwhile
            other.remove(name)
        if LOCK_NAME in present:
            other.remove(LOCK_NAME)
        other.remove_if_empty()


@contextmanager
def _errors_as_warnings(folder: Folder) -> Iterator[None]:
    """Turns an OSError into a warning: the new checkpoint is complete, whether older ones go or stay."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{folder}: older checkpoints cannot be removed: {error}", RuntimeWarning, stacklevel=4)


def _older_folders(folder: Folder) -> list[Folder]:
    """The folders beside this one whose names differ in a smaller number at the end, the largest number first."""
    newest = _NUMBERED.fullmatch(folder.name)
    assert newest is not None
    older = []
    for other in folder.siblings():
        match = _NUMBERED.fullmatch(other.name)
        if match and match[1] == newest[1] and int(match[2]) < int(newest[2]):
            older.append((int(match[2]), other.name, other))
    return [other for _, _, other in sorted(older, key=lambda item: item[:2], reverse=True)]
