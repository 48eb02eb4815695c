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
from shardopt.kernels.dispatch import DTYPES, Addresses, Call, KernelRows, LossScaling, runs_in
from shardopt.kernels.transfers_cuda import SLOT_COUNT, CopyRanges, CudaTransfers, Slot

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

#: The operands that are copied to the kernels' device, by the names of their address fields in ``_C.kernel_row``. All
#: but gradients are copied back.
CopiedFields = tuple[str, ...]

#: For kernels on the device of parameters and gradients: the state is copied there and back.
STATE_FIELDS: CopiedFields = ("low_bits", "codes", "scales")
#: For kernels on the device of the state: parameters and gradients are copied.
STEP_FIELDS: CopiedFields = ("param", "gradient")
#: For kernels on the device of the state where gradients were copied there before (``overlap_forward``).
PARAM_FIELDS: CopiedFields = ("param",)

_PREFETCHED = SLOT_COUNT - 1  # number of chunks that are prefetched


class StreamedCall:
    """The :class:`Call` of kernel rows some of whose operands lie on another device than the kernels run on.

    Args:
        kernel_rows: rows with the operands' home addresses, where the operands stay between steps.
        steps: addresses of the step counts; see :class:`shardopt.kernels.dispatch.CpuCall`.
        extents: sizes ``EXTENT``, one per kernel row.
        units: per kernel row, the ascending number of its transfer unit: rows that are copied in the same chunk.
        fields: the operands that are copied.
        transfers: allocates the slots, and copies to and from them.
        chunk_bytes: the size of a slot, and thus the most bytes of a chunk. Transfer units must be smaller by
            :data:`UNIT_OVERHEAD`, and a chunk must hold at least one block of 4096 elements.
        make: creates the call that runs the kernels on a chunk, given its kernel rows and the step counts.
    """

    def __init__(
        self,
        kernel_rows: KernelRows,
        steps: Addresses,
        extents: npt.NDArray[np.void],
        units: npt.NDArray[np.int64],
        fields: CopiedFields,
        transfers: CudaTransfers,
        chunk_bytes: int,
        make: Callable[[KernelRows, Addresses], Call],
    ) -> None:
        self._kernel_rows, self._transfers = kernel_rows, transfers
        self._chunks: list[_Chunk] = []
        chunk_rows = _chunk_rows(kernel_rows["cut"] != 0, extents, units, fields, chunk_bytes)
        for rows, slot in zip(chunk_rows, transfers.assign_slots(len(chunk_rows)), strict=True):
            in_slot = kernel_rows[rows]  # a copy, whose addresses update_addresses() replaces
            self._chunks.append(_Chunk(rows, in_slot, extents[rows], fields, slot, make(in_slot, steps)))
            steps = steps[:0]  # the first chunk increments all step counts

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step; see :class:`Call`."""
        for chunk in self._chunks:
            chunk.call.update(rows_changed and chunk.update_addresses(self._kernel_rows), groups, scaling)

    def run(self, phase: _C.Phase) -> None:
        """Runs one phase; see :class:`Call`."""
        transfers = self._transfers
        chunks = [chunk for chunk in self._chunks if runs_in(phase, chunk.kernel_rows)]
        if not chunks:
            return
        transfers.begin_phase()
        for chunk in chunks[:_PREFETCHED]:
            transfers.fetch(chunk.slot, chunk.to_slot, chunk.copied_back)
        for index, chunk in enumerate(chunks):
            transfers.wait_until_filled(chunk.slot)
            chunk.call.run(phase)
            changed = _NO_COPIES if phase == _C.Phase.sums else chunk.from_slot  # sums change no operand
            # Also without copies: its event tells the next fetch into this slot that the kernels are done.
            chunk.copied_back = transfers.copy_back(chunk.slot, changed)
            if index + _PREFETCHED < len(chunks):
                following = chunks[index + _PREFETCHED]
                transfers.fetch(following.slot, following.to_slot, following.copied_back)
        transfers.end_phase()


_NO_COPIES = CopyRanges(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(eq=False)
class _Chunk:
    """Kernel rows whose operands are copied into one slot together, stepped there, and copied back.

    Attributes:
        rows: indices of the chunk's rows among all kernel rows.
        kernel_rows: a copy of these rows, with addresses in the slot in place of home addresses.
        extents: sizes ``EXTENT`` of these rows.
        fields: the operands that are copied.
        slot: the staging buffer on the kernels' device.
        call: launches the kernels for ``kernel_rows``.
        to_slot: the ranges to copy from home to the slot.
        from_slot: the ranges to copy back from the slot; without gradients.
        copied_back: event after the last :meth:`CudaTransfers.copy_back` of the chunk; None before the first.
    """

    rows: npt.NDArray[np.int64]
    kernel_rows: KernelRows
    extents: npt.NDArray[np.void]
    fields: CopiedFields
    slot: Slot
    call: Call
    to_slot: CopyRanges = _NO_COPIES
    from_slot: CopyRanges = _NO_COPIES
    copied_back: object = None

    def update_addresses(self, kernel_rows: KernelRows) -> bool:
        """Updates copy ranges and ``kernel_rows`` from all rows' home addresses; returns whether a row changed."""
        rows = kernel_rows[self.rows]  # a copy
        kept = [field for field in self.fields if field != "gradient"]  # kernels change no gradient
        self.to_slot = self.from_slot = _copy_ranges(rows, self.extents, kept, 0)
        if "gradient" in self.fields:
            end = int((self.from_slot.offset + self.from_slot.nbytes).max(initial=0))
            gradients = _copy_ranges(rows, self.extents, ["gradient"], end)
            self.to_slot = CopyRanges(*(np.concatenate(both) for both in zip(self.from_slot, gradients, strict=True)))
        slot_end = int((self.to_slot.offset + self.to_slot.nbytes).max(initial=0))
        assert slot_end <= self.slot.memory.nbytes, "a chunk that no slot has room for"
        order = np.argsort(self.to_slot.home)
        starts, offsets = self.to_slot.home[order], self.to_slot.offset[order]
        for field in self.fields:
            addresses = rows[field]  # a view of ``rows``, in which slot addresses replace the home addresses
            copied = (self.extents[field] > 0) & (addresses > 0)
            # Merged ranges hold several operands: each is as far from its range's start in the slot as at home.
            ranges = np.searchsorted(starts, addresses[copied], side="right") - 1
            offset_in_range = addresses[copied] - starts[ranges]
            addresses[copied] = np.uint64(self.slot.address) + offsets[ranges].astype(np.uint64) + offset_in_range
        changed = not np.array_equal(rows, self.kernel_rows)
        self.kernel_rows[...] = rows
        return changed


def _chunk_rows(
    cut: npt.NDArray[np.bool_],
    extents: npt.NDArray[np.void],
    units: npt.NDArray[np.int64],
    fields: CopiedFields,
    chunk_bytes: int,
) -> list[npt.NDArray[np.int64]]:
    """Groups transfer units into chunks that fit a slot, and returns the indices of the kernel rows of each chunk.

    Rows with cut blocks (``cut``) have chunks of their own: the phases after the first copy no other chunks.
    """
    sizes = np.zeros(len(units), np.int64)  # bytes per row
    for field in fields:
        sizes += np.atleast_2d(extents[field].T).sum(0) * (MAX_GRADIENT_BYTES if field == "gradient" else 1)
    chunk_rows: list[npt.NDArray[np.int64]] = []
    for rows in filter(len, (np.flatnonzero(~cut), np.flatnonzero(cut))):
        begins = np.flatnonzero(np.diff(units[rows], prepend=-1))  # of transfer units
        first = filled = 0  # the chunk's first row, and its bytes so far
        for begin, size in zip(begins.tolist(), np.add.reduceat(sizes[rows], begins).tolist(), strict=True):
            if filled and filled + size + UNIT_OVERHEAD > chunk_bytes:
                chunk_rows.append(rows[first:begin])
                first, filled = begin, 0
            filled += size + UNIT_OVERHEAD
        chunk_rows.append(rows[first:])
    return chunk_rows or [np.zeros(0, np.int64)]  # the first chunk counts the steps, even without kernel rows


def _copy_ranges(
    kernel_rows: KernelRows, extents: npt.NDArray[np.void], fields: Sequence[str], first_offset: int
) -> CopyRanges:
    """Lists the memory ranges behind some address fields, packed into a slot from ``first_offset`` on.

    Overlapping ranges are merged, so that each byte is copied once. Addresses in the slot equal home addresses modulo
    ``_ALIGNMENT``: aligned operands stay aligned, for which CUDA has faster kernels.
    """
    starts = np.concatenate([kernel_rows[field].reshape(-1) for field in fields])
    lengths = np.concatenate([extents[field].reshape(-1) for field in fields])
    if "gradient" in fields:
        lengths = lengths * _GRADIENT_BYTES[kernel_rows["gradient_dtype"]]
    used = (starts > 0) & (lengths > 0)  # address 0: the row has no such operand
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
