"""Offloading from the CPU to the CPU, through the same scheduler as from an accelerator."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardopt.kernels.transfers_cuda import SLOT_COUNT, CopyRanges, CudaTransfers, Slot
from shardopt.release.backward import BackwardRelease
from shardopt.state import residency


class HostTransfers(CudaTransfers):
    """Copies within the CPU's memory, which block."""

    def __init__(self, nbytes: int) -> None:
        self._slots = [Slot(torch.empty(nbytes, dtype=torch.uint8, device="cpu")) for _ in range(SLOT_COUNT)]
        self._assigned = 0

    def begin_phase(self) -> None:
        pass

    def fetch(self, slot: Slot, copies: CopyRanges, after: object) -> None:
        for home, offset, nbytes in zip(*(column.tolist() for column in copies), strict=True):
            ctypes.memmove(slot.address + offset, home, nbytes)

    def wait_until_filled(self, slot: Slot) -> None:
        pass

    def copy_back(self, slot: Slot, copies: CopyRanges) -> object:
        for home, offset, nbytes in zip(*(column.tolist() for column in copies), strict=True):
            ctypes.memmove(home, slot.address + offset, nbytes)
        return None

    def end_phase(self) -> None:
        pass

    def wait_for_current_stream(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextmanager
def offload_from_cpu(chunk_bytes: int = 16384, transfers: type[HostTransfers] = HostTransfers) -> Iterator[None]:
    """Inside, ``offload`` counts for parameters on the CPU; ``transfers`` copy ``chunk_bytes`` at a time."""
    with patch.multiple(
        residency,
        CHUNK_BYTES=chunk_bytes,
        can_offload=lambda device: device.type == "cpu",
        CudaTransfers=lambda device, nbytes, to_host: transfers(nbytes),
        warn_of_one_thread=lambda: None,
    ):
        yield


class LateTransfers(HostTransfers):
    """Copies as late as an accelerator may: in when they are waited for, out when a slot or chunk is needed again.

    Until then slots are full of what a kernel must not see. Copied bytes are counted.
    """

    latest: LateTransfers

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.bytes_in = self.bytes_out = 0
        self._filling: dict[int, CopyRanges] = {}
        self._emptying: dict[int, tuple[object, CopyRanges]] = {}
        self.most_in_flight = 0
        LateTransfers.latest = self

    def fetch(self, slot: Slot, copies: CopyRanges, after: object) -> None:
        assert slot.address not in self._filling, "a slot is filled twice without being used"
        self._empty(slot.address)
        for address, (token, _) in list(self._emptying.items()):
            if after is None or token is after:
                self._empty(address)
        room = self._slots[0].memory.nbytes
        ctypes.memset(slot.address, 0xFF, room)
        ends = copies.offset + copies.nbytes
        assert int(ends.max(initial=0)) <= room, "a chunk is larger than a slot"
        order = copies.offset.argsort()
        assert (ends[order][:-1] <= copies.offset[order][1:]).all(), "offsets overlap"
        self._filling[slot.address] = copies
        self.most_in_flight = max(self.most_in_flight, len(self._filling) + len(self._emptying))

    def wait_until_filled(self, slot: Slot) -> None:
        copies = self._filling.pop(slot.address)
        self.bytes_in += int(copies.nbytes.sum())
        super().fetch(slot, copies, None)

    def copy_back(self, slot: Slot, copies: CopyRanges) -> object:
        token = object()
        self._emptying[slot.address] = (token, copies)
        self.bytes_out += int(copies.nbytes.sum())
        return token

    def end_phase(self) -> None:
        assert not self._filling, "what was fetched was not used"

    def synchronize(self) -> None:
        for address in list(self._emptying):
            self._empty(address)

    def _empty(self, address: int) -> None:
        if address in self._emptying:
            _, copies = self._emptying.pop(address)
            slot = next(slot for slot in self._slots if slot.address == address)
            super().copy_back(slot, copies)


class LateStepTransfers(LateTransfers):
    """Late transfers where parameters come back, which are to be seen at the end of each step."""

    def end_phase(self) -> None:
        super().end_phase()
        self.synchronize()


def late_transfers(offload: str) -> type[LateTransfers]:
    """Late transfers for a value of the option."""
    return LateTransfers if offload == "state" else LateStepTransfers


@contextmanager
def before_steps(call: Callable[[int], object]) -> Iterator[None]:
    """Inside, ``call(index)`` runs in the worker thread before the step of the optimizer's parameter ``index``."""
    original = BackwardRelease._submit_step

    def submit(self: BackwardRelease, param: Tensor, step: Callable[[], None], **options: Any) -> None:
        def late() -> None:
            call(self._progress[param].index)
            step()

        original(self, param, late, **options)

    with patch.object(BackwardRelease, "_submit_step", submit):
        yield


def slow_steps(seconds: float) -> AbstractContextManager[None]:
    """Inside, each step in the other thread takes that much longer."""
    return before_steps(lambda order: time.sleep(seconds))
