"""Skips where this version of PyTorch lacks something that newer ones have."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

needs_async_save = pytest.mark.skipif(
    "async_stager" not in inspect.signature(state_dict_saver.async_save).parameters,
    reason="PyTorch's async_save takes no stager before 2.9",
)

needs_scaled_mm_on_the_cpu = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"),
    reason="PyTorch has _scaled_mm on GPUs alone before 2.7",
)
