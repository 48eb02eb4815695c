"""A step whose operands live on another device than its kernels: chunks are copied in, stepped and copied out.

Some slots of fixed size take turns. If the device copies asynchronously, the next chunks are on their way in and the
last one is on its way back while the kernels step one; see :class:`Transfers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import DTYPES, Call, LossScaling, Tables, runs_in

#: Bytes of memory behind each address in a row of ``_C.kernel_row``. For the gradient elements instead of bytes, as
#: its dtype may change from step to step.
EXTENT = np.dtype(
    [
        ("param", np.int64),
        ("gradient", np.int64),
        ("low_bits", np.int64),
        ("codes", np.int64, (_C.max_moments,)),
        ("scales", np.int64, (_C.max_moments,)),
    ]
)

_ALIGNMENT = 64  # bytes: copies are aligned as their originals are

#: Largest cost of aligning a transfer unit's operands, in bytes.
UNIT_OVERHEAD = 2 * _ALIGNMENT * (3 + 2 * _C.max_moments)

_GRADIENT_BYTES = np.zeros(len(DTYPES), np.int64)  # per element, by the kernels' number of the dtype
_GRADIENT_BYTES[list(DTYPES.values())] = [dtype.itemsize for dtype in DTYPES]

#: The most bytes that an element of a gradient takes.
MAX_GRADIENT_BYTES = int(_GRADIENT_BYTES.max())

Addresses = npt.NDArray[np.uint64]


class Moves(NamedTuple):
    """Operands of the tables that are copied: fields of ``_C.kernel_row``."""

    there: tuple[str, ...]  # to the kernels' device
    back: tuple[str, ...]
    together: bool  # whether adjacent ranges are one copy; False if they may belong to several allocations


#: For kernels on the device of parameters and gradients: the state moves.
STATE_MOVES = Moves(("low_bits", "codes", "scales"), ("low_bits", "codes", "scales"), together=True)
#: For kernels on the device of the state: parameters and gradients move.
STEP_MOVES = Moves(("param", "gradient"), ("param",), together=False)
#: For kernels there, too, where the gradients lie beside the state: parameters move.
KEPT_MOVES = Moves(("param",), ("param",), together=False)


class Copies(NamedTuple):
    """Ranges of memory that are copied together: home addresses, offsets in a slot, and bytes."""

    home: Addresses
    offset: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]


class Slot:
    """Staging memory on the kernels' device that chunks use in turn: uint8."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    @property
    def address(self) -> int:
        """Address of the memory."""
        return self.memory.data_ptr()


class Transfers(ABC):
    """The slots, and the copies to and from them.

    A chunk is fetched into a slot, used after :meth:`arrived` has returned, and given back. Copies of a slot wait for
    each other, and so do copies of a chunk from step to step.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._next = 0

    def slots(self, count: int) -> list[Slot]:
        """The slots for ``count`` chunks, in turn."""
        begin, self._next = self._next, self._next + count
        return [self._slots[index % len(self._slots)] for index in range(begin, begin + count)]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.memory.nbytes for slot in self._slots)

    @abstractmethod
    def begin(self) -> None:
        """Comes before the first fetch: copies must see all that was computed before."""

    @abstractmethod
    def fetch(self, slot: Slot, copies: Copies, after: object) -> None:
        """Begins to copy to a slot.

        Args:
            slot: the target.
            copies: the ranges to copy.
            after: wait for this result of :meth:`give_back` for the chunk. None: wait for all that was given back.
        """

    @abstractmethod
    def arrived(self, slot: Slot) -> None:
        """Has later kernels wait for the slot's contents."""

    @abstractmethod
    def give_back(self, slot: Slot, copies: Copies) -> object:
        """Begins to copy from a slot, after earlier kernels are done."""

    @abstractmethod
    def end(self) -> None:
        """Comes after the last copy: later computations must see what came back."""

    @abstractmethod
    def follow(self) -> None:
        """Has :meth:`synchronize` wait for all that was begun before, too, such as PyTorch's copies to the host."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until all copies are done."""


class StreamedTables(NamedTuple):
    """Tables whose operands move.

    Attributes:
        tables: with the operands' home addresses.
        extents: rows of ``EXTENT``, one per kernel row.
        units: number of the transfer unit per kernel row, ascending: rows of a transfer unit move together.
    """

    tables: Tables
    extents: npt.NDArray[np.void]
    units: npt.NDArray[np.int64]


class StreamedCall:
    """The :class:`Call` of tables whose operands move.

    Args:
        streamed: the tables.
        moves: the operands that move.
        transfers: the copies.
        chunk_bytes: the most bytes that are moved at a time, and the size of a slot. Transfer units must be smaller by
            :data:`UNIT_OVERHEAD`, and a chunk must hold at least one block of 4096 elements.
        make: makes the calls of the kernels.
    """

    def __init__(
        self,
        streamed: StreamedTables,
        moves: Moves,
        transfers: Transfers,
        chunk_bytes: int,
        make: Callable[[Tables], Call],
    ) -> None:
        self._kernel_rows = streamed.tables.kernel_rows
        self._transfers = transfers
        self._chunk_bytes = chunk_bytes
        self._slots: Sequence[Slot] = []
        rows = _chunk_rows(streamed, moves, chunk_bytes)
        self._chunks = [_Chunk(streamed, moves, chunk, first=i == 0, make=make) for i, chunk in enumerate(rows)]

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step; see :class:`Call`."""
        if rows_changed:
            for chunk in self._chunks:
                chunk.find_copies(self._kernel_rows)
                assert chunk.nbytes <= self._chunk_bytes, "a chunk that no slot has room for"
            if not self._slots:
                self._slots = self._transfers.slots(len(self._chunks))
            for chunk, slot in zip(self._chunks, self._slots, strict=True):
                chunk.use(slot)
        for chunk in self._chunks:
            chunk.update(groups, scaling)

    def run(self, phase: _C.Phase) -> None:
        """Runs one phase; see :class:`Call`."""
        transfers = self._transfers
        chunks = [chunk for chunk in self._chunks if runs_in(phase, chunk.has_sums, chunk.has_cut)]
        if not chunks:
            return
        transfers.begin()
        for chunk in chunks[:_AHEAD]:
            chunk.fetch(transfers)
        for index, chunk in enumerate(chunks):
            transfers.arrived(chunk.slot)
            chunk.call.run(phase)
            chunk.give_back(transfers, unchanged=phase == _C.Phase.sums)
            for following in chunks[index + _AHEAD : index + _AHEAD + 1]:
                following.fetch(transfers)
        transfers.end()


#: Slots that take turns: one is stepped, one is filled and one is emptied.
SLOTS = 3
_AHEAD = SLOTS - 1


class _Chunk:
    """Transfer units that are moved and stepped in one go.

    Args:
        streamed: all tables.
        moves: the operands that move.
        rows: indices of the kernel rows that belong to the chunk.
        first: whether this is the chunk that counts up the steps.
        make: makes the call of the kernels.
    """

    def __init__(
        self,
        streamed: StreamedTables,
        moves: Moves,
        rows: npt.NDArray[np.int64],
        *,
        first: bool,
        make: Callable[[Tables], Call],
    ) -> None:
        tables = streamed.tables
        self._rows = rows
        self._moves = moves
        self._extents = streamed.extents[rows]
        self._tables = tables._replace(
            kernel_rows=tables.kernel_rows[rows], steps=tables.steps if first else tables.steps[:0]
        )
        self._home = tables.kernel_rows[rows]
        self._there = self._back = _no_copies()
        self._changed = True
        self._last: object = None
        self.has_cut, self.has_sums = bool(self._home["cut"].any()), bool(self._home["sums"].any())
        self.call = make(self._tables)

    @property
    def nbytes(self) -> int:
        """Bytes of a slot that the chunk takes."""
        ends = self._there.offset + self._there.nbytes
        return int(ends.max()) if len(ends) else 0

    def find_copies(self, kernel_rows: npt.NDArray[np.void]) -> None:
        """Computes the copies from the operands' home addresses in ``kernel_rows``."""
        self._home = kernel_rows[self._rows]
        only_there = [field for field in self._moves.there if field not in self._moves.back]
        self._back = _copies(self._home, self._extents, self._moves.back, 0, self._moves.together)
        end = int(self._back.offset[-1] + self._back.nbytes[-1]) if len(self._back.offset) else 0
        more = _copies(self._home, self._extents, only_there, end, self._moves.together)
        self._there = Copies(*(np.concatenate(both) for both in zip(self._back, more, strict=True)))

    def use(self, slot: Slot) -> None:
        """Rewrites the tables to the slot's memory."""
        self.slot = slot
        rebased = self._home.copy()
        copies = self._there
        order = np.argsort(copies.home)
        starts, offsets = copies.home[order], copies.offset[order]
        for field in self._moves.there:
            addresses, extents = rebased[field], self._extents[field]
            moved = (extents > 0) & (addresses > 0)
            at = np.searchsorted(starts, addresses[moved], side="right") - 1
            inside = addresses[moved] - starts[at]
            addresses[moved] = np.uint64(slot.address) + offsets[at].astype(np.uint64) + inside
        if not np.array_equal(rebased, self._tables.kernel_rows):
            self._tables.kernel_rows[...] = rebased
            self._changed = True

    def update(self, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step."""
        self.call.update(self._changed, groups, scaling)
        self._changed = False

    def fetch(self, transfers: Transfers) -> None:
        """Begins to copy the chunk in."""
        transfers.fetch(self.slot, self._there, self._last)

    def give_back(self, transfers: Transfers, *, unchanged: bool) -> None:
        """Begins to copy the chunk out, or only frees its slot if nothing was changed."""
        self._last = transfers.give_back(self.slot, _no_copies() if unchanged else self._back)


def _chunk_rows(streamed: StreamedTables, moves: Moves, chunk_bytes: int) -> list[npt.NDArray[np.int64]]:
    """The indices of each chunk's kernel rows: whole transfer units, cut blocks apart from others."""
    extents, units = streamed.extents, streamed.units
    sizes = sum(_per_row(extents[field], field) for field in moves.there)
    cut = streamed.tables.kernel_rows["cut"] != 0
    chunk_rows: list[npt.NDArray[np.int64]] = []
    for of_kind in (~cut, cut):
        rows = np.flatnonzero(of_kind)
        if not len(rows):
            continue
        begins = np.flatnonzero(np.diff(units[rows], prepend=-1))
        per_unit = np.add.reduceat(np.asarray(sizes)[rows], begins) + UNIT_OVERHEAD
        chunk, chunks, filled = 0, [], 0
        for size in per_unit.tolist():
            if filled and filled + size > chunk_bytes:
                chunk, filled = chunk + 1, 0
            chunks.append(chunk)
            filled += size
        of_row = np.repeat(chunks, np.diff(begins, append=len(rows)))
        chunk_rows += [rows[of_row == index] for index in range(chunk + 1)]
    return chunk_rows or [np.zeros(0, np.int64)]  # the first chunk counts the steps, even without kernel rows


def _per_row(extents: npt.NDArray[np.int64], field: str) -> npt.NDArray[np.int64]:
    """Bytes per kernel row; for gradients, of their widest dtype."""
    sizes: npt.NDArray[np.int64] = extents if extents.ndim == 1 else extents.sum(1)
    return sizes * MAX_GRADIENT_BYTES if field == "gradient" else sizes


def _no_copies() -> Copies:
    return Copies(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))


def _copies(
    kernel_rows: npt.NDArray[np.void],
    extents: npt.NDArray[np.void],
    fields: Sequence[str],
    first_offset: int,
    together: bool,
) -> Copies:
    """The memory behind some fields of kernel rows, each byte once; its offsets in a slot, from ``first_offset`` on."""
    starts_of, lengths_of = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for field in fields:
        lengths = extents[field]
        if field == "gradient":
            lengths = lengths * _GRADIENT_BYTES[kernel_rows["gradient_dtype"]]
        starts_of.append(kernel_rows[field].reshape(-1))
        lengths_of.append(lengths.reshape(-1))
    starts, lengths = np.concatenate(starts_of), np.concatenate(lengths_of)
    used = (starts > 0) & (lengths > 0)
    starts, lengths = starts[used], lengths[used]
    if not len(starts):
        return _no_copies()
    order = np.argsort(starts, kind="stable")
    starts, lengths = starts[order], lengths[order]
    ends = np.maximum.accumulate(starts + lengths.astype(np.uint64))
    apart = starts[1:] > ends[:-1] if together else starts[1:] >= ends[:-1]
    begins = np.flatnonzero(np.concatenate(([True], apart)))
    home = starts[begins]
    nbytes = (ends[np.append(begins[1:] - 1, len(ends) - 1)] - home).astype(np.int64)
    lead = (home % np.uint64(_ALIGNMENT)).astype(np.int64)
    room = -(-(lead + nbytes) // _ALIGNMENT) * _ALIGNMENT
    base = -(-first_offset // _ALIGNMENT) * _ALIGNMENT
    offset = base + np.concatenate(([0], np.cumsum(room)[:-1])) + lead
    return Copies(home, offset, nbytes)
