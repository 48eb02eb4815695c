"""Counts the gradient elements that an optimizer's kernels have skipped: NaN, Inf, or overflowing a moment."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor


class SkippedElements:
    """Sums the gradient elements that an optimizer's kernels have skipped, on the host and on all devices.

    CUDA kernels count in device memory. After each step, :meth:`copy_counts_to_host` copies the count in a separate
    stream, without waiting for kernels in flight: elements that they skip appear in a later copy.
    """

    def __init__(self) -> None:
        self._on_host = 0
        self._lock = Lock()  # steps may be taken in several threads
        # By device: the counter, its last copy in host memory, and the stream of the copies (CUDA only).
        self._on_devices: dict[torch.device, tuple[Tensor, Tensor, torch.cuda.Stream | None]] = {}

    def add(self, count: int) -> None:
        """Adds the number of elements that CPU kernels have skipped."""
        with self._lock:
            self._on_host += count

    def counter(self, device: torch.device) -> Tensor:
        """The int64 scalar in a device's memory to which the device's kernels add, created by the first call."""
        with self._lock:
            if device not in self._on_devices:
                host_copy = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda").zero_()
                # A blocking copy: kernels in any stream may count from now on, and would not wait for the zero.
                counter, stream = host_copy.to(device, copy=True), None
                if device.type == "cuda":  # not in tests that interpret CUDA kernels on the CPU
                    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                    counter.record_stream(stream)  # a copy in the stream may still read the counter when it is freed
                self._on_devices[device] = counter, host_copy, stream
            return self._on_devices[device][0]

    def copy_counts_to_host(self) -> None:
        """Begins to copy the devices' counters to pinned host memory, except while a CUDA graph is captured."""
        for counter, host_copy, stream in self._on_devices.values():
            if stream is None:
                host_copy.copy_(counter)
            elif not torch.cuda.is_current_stream_capturing():
                with torch.cuda.stream(stream):
                    host_copy.copy_(counter, non_blocking=True)

    def count(self, *, wait: bool) -> int:
        """Number of elements skipped so far, summed over host and devices.

        Args:
            wait: whether to wait for all kernels in flight (ignored while a CUDA graph is captured). If not, elements
                that were skipped since the last finished :meth:`copy_counts_to_host` are missing.
        """
        total = self._on_host
        for device, (counter, host_copy, _) in self._on_devices.items():
            if wait and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # kernels in any stream may have counted
                host_copy = counter
            total += int(host_copy)
        return total
