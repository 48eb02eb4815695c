"""Counts the gradient elements that kernels skip, over all calls that an optimizer makes."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor


class SkippedElements:
    """How many gradient elements an optimizer's kernels have skipped.

    Kernels on a CUDA device count in its memory. The host learns of that once per step, and never waits for it.
    """

    def __init__(self) -> None:
        self._on_host = 0
        self._lock = Lock()  # steps may be taken in several threads
        # By device: the counter, and its last copy in host memory.
        self._on_devices: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def add(self, count: int) -> None:
        """Adds elements that the host has counted."""
        if count:
            with self._lock:
                self._on_host += count

    def counter(self, device: torch.device) -> Tensor:
        """The counter to which kernels on a device add: an int64 scalar."""
        with self._lock:
            if device not in self._on_devices:
                known = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda").zero_()
                # This copy waits: streams that know nothing of each other may count from now on.
                self._on_devices[device] = known.to(device, copy=True), known
            return self._on_devices[device][0]

    def publish(self) -> None:
        """Begins to copy the devices' counters to the host, in the current streams."""
        for device, (counter, known) in self._on_devices.items():
            if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                counter.record_stream(torch.cuda.current_stream(device))
            known.copy_(counter, non_blocking=True)

    def count(self, *, wait: bool) -> int:
        """The sum.

        Args:
            wait: wait for the devices, but not in the middle of a capture; otherwise the host may know of some only
                later.
        """
        total = self._on_host
        for device, (counter, known) in self._on_devices.items():
            if wait and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # kernels in any stream may have counted
                known = counter
            total += int(known)
        return total
