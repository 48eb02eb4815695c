"""Saves tensors as a portable checkpoint, into a folder or an object store.

A checkpoint is a folder of data files and ``checkpoint.json`` (:mod:`shardopt.checkpoint.index`), which one rename puts
in place once all data are on the disk. The previous checkpoint stays loadable until then, whatever happens. All bytes
are verified by their checksums before use. All ranks must see the folder. Only one save at a time writes into the
folder: the first rank holds ``checkpoint.lock``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from shardopt.checkpoint.contents import Contents
from shardopt.checkpoint.copies import check_digests, digests
from shardopt.checkpoint.data_file import check_lengths, require_little_endian, write_data_file
from shardopt.checkpoint.errors import CheckpointError, LostRanksError
from shardopt.checkpoint.index import INDEX_NAME, Index, StoredFile, data_file_name, dump_index, load_index
from shardopt.checkpoint.plan import Plan, Planning
from shardopt.checkpoint.ranks import Ranks
from shardopt.checkpoint.retention import check_keep_last, remove_older, remove_strays
from shardopt.checkpoint.storage import LOCK_NAME, Folder

_PATIENCE = 10.0  # seconds to wait for the lock: a killed process may take some time to end
_TOKEN_BYTES = 8


class Saving:
    """A save into a folder. All ranks must make it, and call :meth:`run`.

    Args:
        folder: the folder, which is made if necessary. A checkpoint in the folder is replaced.
        keep_last: how many checkpoints stay; see :func:`shardopt.checkpoint.retention.remove_older`. None: all.
    """

    def __init__(self, folder: Folder, keep_last: int | None = None) -> None:
        self._folder, self._keep_last = folder, keep_last
        self._locked = ExitStack()  # unlocks the folder at its end
        self._token = ""
        self._written: str | None = None

    def check(self) -> None:
        """Checks the machine and the option ``keep_last``.

        Raises:
            ValueError: ``keep_last`` is no positive whole number, or the folder's name does not end with a number.
            CheckpointError: the machine is big-endian.
        """
        require_little_endian()
        check_keep_last(self._folder, self._keep_last)

    def run(self, read: Callable[[], Contents], ranks: Ranks) -> None:
        """Writes the checkpoint. All ranks must call this: they agree on the plan, on the data files, and on the index.

        The first rank's header is saved, with the ``param_groups`` of all ranks.

        Args:
            read: gives what this rank saves.
            ranks: the ranks that save.

        Raises:
            CheckpointError: on all ranks: the checkpoint could not be written, ranks hold different tensors by one
                name, or another save into the folder goes on. Nothing was changed.
            BaseException: raised by ``read``; other ranks raise a CheckpointError.
        """

        def described() -> tuple[tuple[Contents, Planning], bytes]:
            self.check()
            contents = read()
            planning = Planning(contents, ranks)
            return (contents, planning), planning.message

        with self._locked:
            try:
                (contents, planning), messages = ranks.exchange(described)
                plan = planning.plan(messages)
                _, tokens = ranks.exchange(lambda: (None, self._prepare(ranks.rank)))
                self._token = tokens[0].hex()
                of_ranks = ranks.gathered_numbers(lambda: self._write(plan, contents, ranks.rank))
                check_digests(plan.copies, [numbers[3:] for numbers in of_ranks], contents.tensors, ranks)
                files = [StoredFile(*numbers[:3]) if numbers[1] else None for numbers in of_ranks]
                ranks.agree(lambda: self._commit(plan, contents, files) if ranks.rank == 0 else None)
            except LostRanksError:
                # The first rank may complete the checkpoint yet. If not, the next save removes this rank's file.
                raise
            except BaseException:  # on all ranks
                with suppress(Exception):  # the first error matters
                    self._discard()
                raise
        if self._keep_last is not None and ranks.rank == 0:
            remove_older(self._folder, self._keep_last)

    def _prepare(self, rank: int) -> bytes:
        """Makes the folder; on the first rank also locks it, removes stray files, and returns the save's token."""
        try:
            self._folder.make()
        except OSError as error:
            raise CheckpointError(f"{self._folder}: cannot make this folder: {error}; choose another path") from error
        if rank:
            return b""
        try:
            unlock = self._folder.lock(_PATIENCE)
        except OSError as error:
            path = self._folder.shown(LOCK_NAME)
            raise CheckpointError(f"{path}: cannot be locked: {error}; choose another path") from error
        if unlock is not None:
            self._locked.callback(unlock)
        in_use = self._files_in_use()
        if in_use is not None:
            remove_strays(self._folder, in_use)  # a save that failed on a full disk may have left files
        return bytes.fromhex(secrets.token_hex(_TOKEN_BYTES))

    def _write(self, plan: Plan, contents: Contents, rank: int) -> list[int]:
        """Writes this rank's data file, if it has anything to write; returns its numbers and the digests of copies."""
        own_digests = digests(plan.copies, contents.tensors, rank)
        if not plan.own:
            return [0, 0, 0, *own_digests]
        self._written = data_file_name(self._token, rank)
        with self._refusing(self._written, sum(data.nbytes for _, _, data in plan.own)):
            return [*write_data_file(self._folder, self._written, plan.own), *own_digests]

    def _commit(self, plan: Plan, contents: Contents, files: list[StoredFile | None]) -> None:
        header = contents.header if plan.groups is None else {**contents.header, "param_groups": plan.groups}
        index = Index(header, self._token, files, plan.tensors)
        check_lengths(self._folder, index, [number for number, stored in enumerate(files) if stored is not None])
        text = dump_index(index)
        with self._refusing(INDEX_NAME, len(text)):
            self._folder.put(INDEX_NAME, f"{INDEX_NAME}.{self._token}", text)
        remove_strays(self._folder, index.file_names)

    @contextmanager
    def _refusing(self, name: str, nbytes: int) -> Iterator[None]:
        """Raises a CheckpointError if the system cannot write a file."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._folder.shown(name)}: cannot write {nbytes} bytes: {error.strerror or error}; make room or "
                "choose another path. The previous checkpoint in this folder, if there was one, is as it was"
            ) from error

    def _discard(self) -> None:
        """Removes this rank's data file after a save that failed. Otherwise the next save would remove it."""
        if self._written is not None:
            in_use = self._files_in_use()
            if in_use is not None and self._written not in in_use:
                self._folder.remove(self._written)

    def _files_in_use(self) -> list[str] | None:
        """The data files of the checkpoint in the folder; None if the checkpoint cannot be read."""
        try:
            return load_index(self._folder).file_names
        except CheckpointError as error:
            return [] if isinstance(error.__cause__, FileNotFoundError) else None
