"""Copies between a CUDA device and the host's memory, for :class:`shardopt.kernels.streamed.StreamedCall`."""

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

Addresses = npt.NDArray[np.uint64]

#: Slots that take turns: one is stepped, one is filled and one is emptied.
SLOTS = 3


class CopyRanges(NamedTuple):
    """Ranges of memory that are copied together: home addresses, offsets in a slot, and bytes."""

    home: Addresses
    offset: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]


class Slot:
    """Staging memory on the kernels' device that chunks use in turn: uint8. Events of its last filling and emptying."""

    filled: torch.cuda.Event | None = None
    emptied: torch.cuda.Event | None = None

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.address = memory, memory.data_ptr()


class CudaTransfers:
    """The slots, and the copies to and from them, by two streams, one in each direction.

    A chunk is fetched into a slot, used after :meth:`arrived` has returned, and given back. Copies of a slot wait for
    each other, and so do copies of a chunk from step to step.

    Args:
        device: where the parameters are.
        nbytes: bytes of a slot.
        to_host: whether the kernels run on the CPU, to which parameters and gradients move. Otherwise the state moves
            to the device.
    """

    def __init__(self, device: torch.device, nbytes: int, *, to_host: bool) -> None:
        _refuse_capture()
        where = torch.device("cpu") if to_host else device
        empty = partial(torch.empty, nbytes, dtype=torch.uint8, device=where, pin_memory=to_host)
        self._slots, self._next = [Slot(empty()) for _ in range(SLOTS)], 0
        self._device, self._to_host = device, to_host
        self._there = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._there.wait_stream(torch.cuda.current_stream(device))  # it may still use the memory's previous contents
        memory = [slot.memory for slot in self._slots]
        _finalize(self, partial(_drain, memory, self._there, self._back))

    def slots(self, count: int) -> list[Slot]:
        """The slots for ``count`` chunks, in turn."""
        begin, self._next = self._next, self._next + count
        return [self._slots[index % SLOTS] for index in range(begin, begin + count)]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def begin(self) -> None:
        """Comes before the first fetch: copies must see all that was computed before."""
        _refuse_capture()
        _finish_finalizers()
        if self._to_host:
            self._there.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, slot: Slot, copies: CopyRanges, after: object) -> None:
        """Begins to copy to a slot.

        Args:
            slot: the target.
            copies: the ranges to copy.
            after: wait for this result of :meth:`give_back` for the chunk. None: wait for all that was given back.
        """
        if after is None:
            self._there.wait_stream(self._back)
        for event in (slot.emptied, after):
            if isinstance(event, torch.cuda.Event):
                self._there.wait_event(event)
        to, stream = _places(slot, copies), self._there.cuda_stream
        _C.copy_cuda(self._device.index or 0, to, copies.home, copies.nbytes, stream)
        waits_asleep = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # leaves the core to others
        slot.filled = self._there.record_event(waits_asleep)

    def arrived(self, slot: Slot) -> None:
        """Has later kernels wait for the slot's contents."""
        assert slot.filled is not None
        if self._to_host:
            slot.filled.synchronize()
        else:
            torch.cuda.current_stream(self._device).wait_event(slot.filled)

    def give_back(self, slot: Slot, copies: CopyRanges) -> object:
        """Begins to copy from a slot, after earlier kernels are done."""
        if not self._to_host:
            self.follow()
        source, stream = _places(slot, copies), self._back.cuda_stream
        _C.copy_cuda(self._device.index or 0, copies.home, source, copies.nbytes, stream)
        slot.emptied = self._back.record_event()
        return slot.emptied

    def end(self) -> None:
        """Comes after the last copy: later computations must see what came back."""
        if self._to_host:
            torch.cuda.current_stream(self._device).wait_stream(self._back)

    def follow(self) -> None:
        """Has :meth:`synchronize` wait for all that was begun before, too, such as PyTorch's copies to the host."""
        self._back.wait_stream(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Waits until all copies are done."""
        self._back.synchronize()


def _places(slot: Slot, copies: CopyRanges) -> Addresses:
    return copies.offset.astype(np.uint64) + np.uint64(slot.address)


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "got a step with offload captured into a CUDA graph, expected a step outside of graphs, as the host paces "
            "its copies; leave optimizer.step() out of the graph, or leave out offload"
        )


_waiting_finalizers: list[Callable[[], None]] = []


def _finalize(owner: object, finish: Callable[[], None]) -> None:
    """Has ``finish``, which waits for the device, called when ``owner`` is gone; or later, if a CUDA graph is captured.

    A wait would spoil the capture. Objects that ``finish`` refers to are kept until the call.
    """

    def call() -> None:
        _waiting_finalizers.append(finish)
        if not torch.cuda.is_current_stream_capturing():
            _finish_finalizers()

    weakref.finalize(owner, call).atexit = False


def _finish_finalizers() -> None:
    while _waiting_finalizers:
        _waiting_finalizers.pop()()


def _drain(memory: list[Tensor], *streams: torch.cuda.Stream) -> None:
    """Waits for copies under way, after which their memory may be reused."""
    for stream in streams:
        stream.synchronize()


def pin_memory(memory: Tensor, owner: object, device: torch.device) -> None:
    """Page-locks memory of the CPU until ``owner`` is gone; the memory is not freed before.

    PyTorch's own pinned memory comes in powers of two, and PyTorch's CUDA runtime would keep the error of a refusal and
    raise it at its next kernel.

    Args:
        memory: whole pages.
        owner: keeps the pages locked.
        device: a CUDA device that copies from and to the pages; others may, too.

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
