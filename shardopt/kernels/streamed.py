"""Steps offloaded parameters: operands in the memory of another device are copied in chunks, stepped and copied back.

Chunks use a few staging buffers ("slots") in rotation, so that copies overlap with kernels: while one chunk is stepped,
the next are prefetched and the last is copied back; see :class:`CudaTransfers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardopt import _C
from shardopt.kernels.dispatch import DTYPES, Call, LossScaling, Tables, runs_in
from shardopt.kernels.transfers_cuda import SLOTS, CopyRanges, CudaTransfers, Slot

#: Bytes of memory that a kernel row uses from each of its addresses on. For the gradient, elements instead of bytes,
#: as its dtype may change from step to step.
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

#: The most bytes of padding that aligned copies of a transfer unit's operands need.
UNIT_OVERHEAD = 2 * _ALIGNMENT * (3 + 2 * _C.max_moments)

_GRADIENT_BYTES = np.zeros(len(DTYPES), np.int64)  # per element, by the kernels' number of the dtype
_GRADIENT_BYTES[list(DTYPES.values())] = [dtype.itemsize for dtype in DTYPES]

#: The most bytes that an element of a gradient takes.
MAX_GRADIENT_BYTES = int(_GRADIENT_BYTES.max())

#: Which operands are copied to the kernels' device: names of address fields of ``_C.kernel_row``. All but gradients
#: are copied back.
Moves = tuple[str, ...]

#: For kernels on the device of parameters and gradients: the state is copied there and back.
STATE_MOVES: Moves = ("low_bits", "codes", "scales")
#: For kernels on the device of the state: parameters and gradients are copied.
STEP_MOVES: Moves = ("param", "gradient")
#: For kernels on the device of the state, which already has the gradients: only parameters are copied.
KEPT_MOVES: Moves = ("param",)

_AHEAD = SLOTS - 1  # number of chunks that are prefetched


class StreamedCall:
    """The :class:`Call` of tables some of whose operands lie on another device than the kernels run on.

    Args:
        tables: the tables, with the operands' home addresses (in the memory where they stay between steps).
        extents: sizes ``EXTENT``, one per kernel row.
        units: per kernel row, the ascending number of its transfer unit: rows that are copied in the same chunk.
        moves: the operands that are copied.
        transfers: allocates the slots, and copies to and from them.
        chunk_bytes: the size of a slot, and thus the most bytes of a chunk. Transfer units must be smaller by
            :data:`UNIT_OVERHEAD`, and a chunk must hold at least one block of 4096 elements.
        make: creates the call that runs the kernels on a chunk's tables.
    """

    def __init__(
        self,
        tables: Tables,
        extents: npt.NDArray[np.void],
        units: npt.NDArray[np.int64],
        moves: Moves,
        transfers: CudaTransfers,
        chunk_bytes: int,
        make: Callable[[Tables], Call],
    ) -> None:
        self._kernel_rows, self._transfers = tables.kernel_rows, transfers
        self._chunks: list[_Chunk] = []
        chunk_rows = _chunk_rows(tables.kernel_rows["cut"] != 0, extents, units, moves, chunk_bytes)
        steps = tables.steps  # which the first chunk counts up
        for rows, slot in zip(chunk_rows, transfers.slots(len(chunk_rows)), strict=True):
            of_chunk = tables._replace(kernel_rows=tables.kernel_rows[rows], steps=steps)
            self._chunks.append(_Chunk(rows, of_chunk.kernel_rows, extents[rows], moves, slot, make(of_chunk)))
            steps = steps[:0]

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step; see :class:`Call`."""
        for chunk in self._chunks:
            chunk.call.update(rows_changed and chunk.place(self._kernel_rows), groups, scaling)

    def run(self, phase: _C.Phase) -> None:
        """Runs one phase; see :class:`Call`."""
        transfers = self._transfers
        chunks = [chunk for chunk in self._chunks if runs_in(phase, chunk.kernel_rows)]
        if not chunks:
            return
        transfers.begin()
        for chunk in chunks[:_AHEAD]:
            transfers.fetch(chunk.slot, chunk.there, chunk.last)
        for index, chunk in enumerate(chunks):
            transfers.arrived(chunk.slot)
            chunk.call.run(phase)
            # The phase ``sums`` changes no operand, so that nothing is copied back.
            chunk.last = transfers.give_back(chunk.slot, _NO_COPIES if phase == _C.Phase.sums else chunk.back)
            for following in chunks[index + _AHEAD : index + _AHEAD + 1]:
                transfers.fetch(following.slot, following.there, following.last)
        transfers.end()


_NO_COPIES = CopyRanges(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(eq=False)
class _Chunk:
    """Kernel rows whose operands are copied into one slot together, stepped there, and copied back.

    Attributes:
        rows: indices of the chunk's rows among all kernel rows.
        kernel_rows: a copy of these rows, with addresses in the slot in place of home addresses.
        extents: sizes ``EXTENT`` of these rows.
        moves: the operands that are copied.
        slot: the staging buffer on the kernels' device.
        call: launches the kernels for ``kernel_rows``.
        there: the ranges to copy from home to the slot.
        back: the ranges to copy back from the slot; without gradients.
        last: event after the chunk was last copied back (:meth:`CudaTransfers.give_back`); None before the first time.
    """

    rows: npt.NDArray[np.int64]
    kernel_rows: npt.NDArray[np.void]
    extents: npt.NDArray[np.void]
    moves: Moves
    slot: Slot
    call: Call
    there: CopyRanges = _NO_COPIES
    back: CopyRanges = _NO_COPIES
    last: object = None

    def place(self, kernel_rows: npt.NDArray[np.void]) -> bool:
        """Recomputes copies and slot addresses from the home addresses of all rows; returns whether any row changed."""
        rows = kernel_rows[self.rows]  # a copy
        self.there = self.back = _copy_ranges(rows, self.extents, [f for f in self.moves if f != "gradient"], 0)
        if "gradient" in self.moves:
            end = int((self.back.offset + self.back.nbytes).max(initial=0))
            gradients = _copy_ranges(rows, self.extents, ["gradient"], end)
            self.there = CopyRanges(*(np.concatenate(both) for both in zip(self.back, gradients, strict=True)))
        ends = self.there.offset + self.there.nbytes
        assert int(ends.max(initial=0)) <= self.slot.memory.nbytes, "a chunk that no slot has room for"
        order = np.argsort(self.there.home)
        starts, offsets = self.there.home[order], self.there.offset[order]
        for field in self.moves:
            addresses = rows[field]
            moved = (self.extents[field] > 0) & (addresses > 0)
            at = np.searchsorted(starts, addresses[moved], side="right") - 1
            inside = addresses[moved] - starts[at]
            addresses[moved] = np.uint64(self.slot.address) + offsets[at].astype(np.uint64) + inside
        changed = not np.array_equal(rows, self.kernel_rows)
        self.kernel_rows[...] = rows
        return changed


def _chunk_rows(
    cut: npt.NDArray[np.bool_],
    extents: npt.NDArray[np.void],
    units: npt.NDArray[np.int64],
    moves: Moves,
    chunk_bytes: int,
) -> list[npt.NDArray[np.int64]]:
    """Groups transfer units into chunks that fit a slot, ``cut`` rows apart; returns the kernel rows of each chunk."""
    sizes = np.zeros(len(units), np.int64)
    for field in moves:
        sizes += np.atleast_2d(extents[field].T).sum(0) * (MAX_GRADIENT_BYTES if field == "gradient" else 1)
    chunk_rows: list[npt.NDArray[np.int64]] = []
    for rows in filter(len, (np.flatnonzero(~cut), np.flatnonzero(cut))):
        begins = np.flatnonzero(np.diff(units[rows], prepend=-1))
        first = filled = 0
        for begin, size in zip(begins.tolist(), np.add.reduceat(sizes[rows], begins).tolist(), strict=True):
            if filled and filled + size + UNIT_OVERHEAD > chunk_bytes:
                chunk_rows.append(rows[first:begin])
                first, filled = begin, 0
            filled += size + UNIT_OVERHEAD
        chunk_rows.append(rows[first:])
    return chunk_rows or [np.zeros(0, np.int64)]  # the first chunk counts the steps, even without kernel rows


def _copy_ranges(
    kernel_rows: npt.NDArray[np.void], extents: npt.NDArray[np.void], fields: Sequence[str], first_offset: int
) -> CopyRanges:
    """Lists the memory ranges behind some address fields, and packs them into a slot from ``first_offset`` on.

    Overlapping ranges are merged, so that each byte is copied once. Addresses in the slot equal home addresses modulo
    ``_ALIGNMENT``.
    """
    starts = np.concatenate([kernel_rows[field].reshape(-1) for field in fields])
    lengths = np.concatenate([extents[field].reshape(-1) for field in fields])
    if "gradient" in fields:
        lengths = lengths * _GRADIENT_BYTES[kernel_rows["gradient_dtype"]]
    used = (starts > 0) & (lengths > 0)
    starts, lengths = starts[used], lengths[used]
    if not len(starts):
        return _NO_COPIES
    order = np.argsort(starts, kind="stable")
    starts, lengths = starts[order], lengths[order]
    ends = np.maximum.accumulate(starts + lengths.astype(np.uint64))
    # Adjacent ranges of state are one copy; those of parameters and gradients may belong to several allocations.
    apart = starts[1:] > ends[:-1] if "codes" in fields else starts[1:] >= ends[:-1]
    begins = np.flatnonzero(np.concatenate(([True], apart)))
    home = starts[begins]
    nbytes = (ends[np.append(begins[1:] - 1, len(ends) - 1)] - home).astype(np.int64)
    misalignment = (home % np.uint64(_ALIGNMENT)).astype(np.int64)
    padded_bytes = -(-(misalignment + nbytes) // _ALIGNMENT) * _ALIGNMENT
    base = -(-first_offset // _ALIGNMENT) * _ALIGNMENT
    offset = base + np.concatenate(([0], np.cumsum(padded_bytes)[:-1])) + misalignment
    return CopyRanges(home, offset, nbytes)
