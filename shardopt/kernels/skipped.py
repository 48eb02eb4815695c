"""Counter of the gradient elements that kernels skip, over all calls of an optimizer."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor


class SkippedElements:
    """How many gradient elements an optimizer's kernels have skipped.

    Kernels on a CUDA device count in the device's memory. Once per step the host copies the count in a stream of its
    own, without waiting for kernels in flight: elements that they skip appear in a later copy.
    """

    def __init__(self) -> None:
        self._on_host = 0
        self._lock = Lock()  # steps may be taken in several threads
        # By device: the counter, its last copy in host memory, and the stream of the copies.
        self._on_devices: dict[torch.device, tuple[Tensor, Tensor, torch.cuda.Stream | None]] = {}

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
                counter, stream = host_copy.to(device, copy=True), None
                if device.type == "cuda":
                    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                    counter.record_stream(stream)
                self._on_devices[device] = counter, host_copy, stream
            return self._on_devices[device][0]

    def publish(self) -> None:
        """Begins to copy the devices' counters to the host, except during a capture."""
        for counter, host_copy, stream in self._on_devices.values():
            if stream is None:
                host_copy.copy_(counter)
            elif not torch.cuda.is_current_stream_capturing():
                with torch.cuda.stream(stream):
                    host_copy.copy_(counter, non_blocking=True)

    def count(self, *, wait: bool) -> int:
        """The sum over host and devices.

        Args:
            wait: whether to wait for the devices, except during a capture; without waiting, the last counts may be
                missing.
        """
        total = self._on_host
        for device, (counter, host_copy, _) in self._on_devices.items():
            if wait and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # kernels in any stream may have counted
                host_copy = counter
            total += int(host_copy)
        return total
