"""What this version of PyTorch lacks and newer ones have: skips, and two methods that FSDP2 calls on the CPU."""

from __future__ import annotations

import pytest
import torch

needs_scaled_mm_on_the_cpu = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"),
    reason="PyTorch has _scaled_mm on GPUs alone before 2.7",
)


def add_stream_methods() -> None:
    """Lets FSDP2's forward run on the CPU before PyTorch 2.7, whose streams there lack two methods that do nothing."""
    for name in ("record_event", "wait_event"):
        if not hasattr(torch.cpu.Stream, name):
            setattr(torch.cpu.Stream, name, lambda stream, event=None: None)
