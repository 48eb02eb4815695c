"""Skips where this version of PyTorch lacks something that newer ones have."""

from __future__ import annotations

import pytest
import torch

needs_scaled_mm_on_the_cpu = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"),
    reason="PyTorch has _scaled_mm on GPUs alone before 2.7",
)
