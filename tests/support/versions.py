"""Skips where this version of PyTorch lacks something that newer ones have."""

from __future__ import annotations

import inspect

import pytest
from torch.distributed.checkpoint import state_dict_saver

needs_async_save = pytest.mark.skipif(
    "async_stager" not in inspect.signature(state_dict_saver.async_save).parameters,
    reason="PyTorch's async_save takes no stager before 2.9",
)
