"""Asynchronous copies between CUDA device and pinned host memory, for the steps of offloaded parameters and state."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import Addresses

#: Number of staging buffers ("slots"): kernels use one while another is filled and a third is copied back.
SLOT_COUNT = 3


class CopyRanges(NamedTuple):
    """Memory ranges to copy in one call."""

    home: Addresses  # in the memory where the operands stay between steps
    offset: npt.NDArray[np.int64]  # in a slot
    nbytes: npt.NDArray[np.int64]


class Slot:
    """A staging buffer on the kernels' device (uint8), and the CUDA events after its last copies in and out."""

    filled: torch.cuda.Event | None = None  # after the last copy into the slot
    emptied: torch.cuda.Event | None = None  # after the last copy out of the slot

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.address = memory, memory.data_ptr()


class CudaTransfers:
    """Owns the slots and two CUDA streams, one per direction, and copies chunks of operands to slots and back.

    Per chunk, call :meth:`fetch`, :meth:`wait_until_filled`, the kernels, and :meth:`copy_back`. Events make a slot's
    next fetch wait for its last copy out, and a chunk's fetch for the chunk's copy back in the phase or step before.

    Args:
        device: the parameters' CUDA device.
        nbytes: bytes of a slot.
        to_host: True: the kernels run on the CPU, and parameters and gradients are copied to pinned memory. False: they
            run on the device, and the state is copied to the device's memory.
    """

    def __init__(self, device: torch.device, nbytes: int, *, to_host: bool) -> None:
        _refuse_capture()
        kernel_device = torch.device("cpu") if to_host else device
        empty = partial(torch.empty, nbytes, dtype=torch.uint8, device=kernel_device, pin_memory=to_host)
        self._slots = [Slot(empty()) for _ in range(SLOT_COUNT)]
        self._assigned = 0  # number of chunks that have got a slot
        self._device, self._to_host = device, to_host
        self._fetch_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._return_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The current stream may still use what the allocator had in this memory before.
        self._fetch_stream.wait_stream(torch.cuda.current_stream(device))
        memory = [slot.memory for slot in self._slots]
        _finalize(self, partial(_drain, memory, self._fetch_stream, self._return_stream))

    def assign_slots(self, count: int) -> list[Slot]:
        """Assigns slots to ``count`` chunks round-robin, continuing after the last call."""
        begin, self._assigned = self._assigned, self._assigned + count
        return [self._slots[index % SLOT_COUNT] for index in range(begin, begin + count)]

    @property
    def nbytes(self) -> int:
        """Total bytes of the slots."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def begin_phase(self) -> None:
        """Call before a phase's first fetch: makes fetches wait for the current stream, which computes gradients."""
        _refuse_capture()
        _run_postponed_finalizers()  # no capture is under way now
        if self._to_host:
            self._fetch_stream.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, slot: Slot, copies: CopyRanges, after: object) -> None:
        """Begins to copy a chunk's operands to a slot.

        Args:
            slot: the target.
            copies: the ranges to copy.
            after: result of the chunk's last :meth:`copy_back`, which the copy waits for; None: waits for all of them.
        """
        if after is None:
            self._fetch_stream.wait_stream(self._return_stream)
        for event in (slot.emptied, after):
            if isinstance(event, torch.cuda.Event):
                self._fetch_stream.wait_event(event)
        targets, stream = _slot_addresses(slot, copies), self._fetch_stream.cuda_stream
        _C.copy_cuda(self._device.index or 0, targets, copies.home, copies.nbytes, stream)
        # Blocking: the host thread that waits for the event sleeps, and leaves its core to others.
        slot.filled = self._fetch_stream.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]

    def wait_until_filled(self, slot: Slot) -> None:
        """Makes later kernels wait until the slot is filled; CPU kernels need the calling thread to wait here."""
        assert slot.filled is not None
        if self._to_host:
            slot.filled.synchronize()
        else:
            torch.cuda.current_stream(self._device).wait_event(slot.filled)

    def copy_back(self, slot: Slot, copies: CopyRanges) -> object:
        """Begins to copy operands back from a slot once its kernels are done; returns a CUDA event after the copies."""
        if not self._to_host:  # CPU kernels are done when their call returns
            self.wait_for_current_stream()
        sources, stream = _slot_addresses(slot, copies), self._return_stream.cuda_stream
        _C.copy_cuda(self._device.index or 0, copies.home, sources, copies.nbytes, stream)
        slot.emptied = self._return_stream.record_event()
        return slot.emptied

    def end_phase(self) -> None:
        """Call after a phase's last copy back: makes the current stream wait for the updated parameters."""
        if self._to_host:
            torch.cuda.current_stream(self._device).wait_stream(self._return_stream)

    def wait_for_current_stream(self) -> None:
        """Makes copies back, and so :meth:`synchronize`, wait for the current stream's kernels and PyTorch's copies."""
        self._return_stream.wait_stream(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Blocks the calling thread until all copies back are done."""
        self._return_stream.synchronize()


def _slot_addresses(slot: Slot, copies: CopyRanges) -> Addresses:
    """Device addresses of the ranges' copies in a slot."""
    return copies.offset.astype(np.uint64) + np.uint64(slot.address)


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "got a step with offload captured into a CUDA graph, expected a step outside of graphs, as the host paces "
            "its copies; leave optimizer.step() out of the graph, or leave out offload"
        )


_postponed_finalizers: list[Callable[[], None]] = []


def _finalize(owner: object, finish: Callable[[], None]) -> None:
    """Registers ``finish``, which waits for the device, to be called after ``owner`` is garbage-collected.

    While a CUDA graph is captured, which a wait would invalidate, the call is postponed. ``finish`` stays referenced.
    """

    def call() -> None:
        _postponed_finalizers.append(finish)
        if not torch.cuda.is_current_stream_capturing():
            _run_postponed_finalizers()

    weakref.finalize(owner, call).atexit = False


def _run_postponed_finalizers() -> None:
    while _postponed_finalizers:
        _postponed_finalizers.pop()()


def _drain(memory: list[Tensor], *streams: torch.cuda.Stream) -> None:
    """Waits for copies in flight in the streams. As an argument of this finalizer, ``memory`` is not freed before."""
    for stream in streams:
        stream.synchronize()


def pin_memory(memory: Tensor, owner: object, device: torch.device) -> None:
    """Page-locks host memory until ``owner`` is garbage-collected, and keeps it allocated until then.

    PyTorch's pinned memory is not used, as its sizes are rounded up to powers of two, and PyTorch's CUDA runtime would
    remember a failure to pin memory and raise it at the next kernel launch.

    Args:
        memory: a CPU tensor that consists of whole pages.
        owner: the object during whose lifetime the pages stay locked.
        device: a CUDA device; all devices of the process can copy from and to the pages.

    Raises:
        MemoryError: the system refuses to lock so much memory.
    """
    index = device.index or 0
    error = _C.pin_cuda(index, memory.data_ptr(), memory.nbytes)
    if error != 0:
        raise MemoryError(
            f"offload: got CUDA error {error} for locking {memory.nbytes / 2**30:.2f} GiB of host memory, expected a "
            "system that lets so much be locked; give some parameters a param group with offload=None"
        )
    _finalize(owner, partial(_unpin, memory, index))


def _unpin(memory: Tensor, index: int) -> None:
    for device in range(torch.cuda.device_count()):
        # Waits for copies under way. The question creates no context on other devices.
        if torch._C._cuda_hasPrimaryContext(device):  # type: ignore[attr-defined]
            torch.cuda.synchronize(device)
    _C.unpin_cuda(index, memory.data_ptr())
