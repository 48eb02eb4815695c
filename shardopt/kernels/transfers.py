"""Copies within the CPU's memory, for :class:`shardopt.kernels.streamed.StreamedCall`.

These copies block, as offloading from the CPU to the CPU gains nothing. An accelerator's copies are compared
with these, and tests run the rest without an accelerator.
"""

from __future__ import annotations

import ctypes

import torch

from shardopt.kernels.streamed import SLOTS, Copies, Slot, Transfers


class HostTransfers(Transfers):
    """See :class:`shardopt.kernels.streamed.Transfers`.

    Args:
        nbytes: bytes of a slot.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__([Slot(torch.empty(nbytes, dtype=torch.uint8, device="cpu")) for _ in range(SLOTS)])

    def begin(self) -> None:
        pass

    def fetch(self, slot: Slot, copies: Copies, after: object) -> None:
        for home, offset, nbytes in zip(*(column.tolist() for column in copies), strict=True):
            ctypes.memmove(slot.address + offset, home, nbytes)

    def arrived(self, slot: Slot) -> None:
        pass

    def give_back(self, slot: Slot, copies: Copies) -> object:
        for home, offset, nbytes in zip(*(column.tolist() for column in copies), strict=True):
            ctypes.memmove(home, slot.address + offset, nbytes)
        return None

    def end(self) -> None:
        pass

    def follow(self) -> None:
        pass

    def synchronize(self) -> None:
        pass
