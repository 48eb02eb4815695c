"""Copies between the memory of the CPU and itself, for :class:`shardopt.kernels.streamed.StreamedCall`.

Nothing here runs beside the kernels: on the CPU there is nothing to gain by offloading to the CPU. This is the
reference of what the copies of an accelerator have to do, and how tests run the rest without one.
"""

from __future__ import annotations

import ctypes

import torch

from shardopt.kernels.streamed import SLOTS, Copies, Slot, Transfers


class HostTransfers(Transfers):
    """See :class:`shardopt.kernels.streamed.Transfers`.

    Args:
        nbytes: of each slot.
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

    def synchronize(self) -> None:
        pass
