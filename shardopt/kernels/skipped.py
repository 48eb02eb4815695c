"""Counter of the gradient elements that kernels skip, over all calls of an optimizer."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor


class SkippedElements:
    """How many gradient elements an optimizer's kernels have skipped.

    Kernels on a CUDA device count in the device's memory. The host learns the count once per step, without waiting.
    """

    def __init__(self) -> None:
        self._on_host = 0
        self._lock = Lock()  # steps may be taken in several threads
        # By device: the counter, and its last copy in host memory.
        self._on_devices: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def add(self, count: int) -> None:
        """Adds elements that the host has counted."""
        with self._lock:
            self._on_host += count

    def counter(self, device: torch.device) -> Tensor:
        """The counter to which kernels on a device add: an int64 scalar."""
        with self._lock:
            if device not in self._on_devices:
                host_copy = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda").zero_()
                # A blocking copy: unsynchronized streams may count from now on.
                self._on_devices[device] = host_copy.to(device, copy=True), host_copy
            return self._on_devices[device][0]

    def publish(self) -> None:
        """Begins to copy the devices' counters to the host, in the current streams."""
        for device, (counter, host_copy) in self._on_devices.items():
            if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                counter.record_stream(torch.cuda.current_stream(device))
            host_copy.copy_(counter, non_blocking=True)

    def count(self, *, wait: bool) -> int:
        """The sum over host and devices.

        Args:
            wait: whether to wait for the devices, except during a capture; without waiting, the last counts may be
                missing.
        """
        total = self._on_host
        for device, (counter, host_copy) in self._on_devices.items():
            if wait and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # kernels in any stream may have counted
                host_copy = counter
            total += int(host_copy)
        return total
