"""The device under test in tests/gpu: without a GPU, or a build for one, the CPU, so that tests can be tried."""

from __future__ import annotations

import pytest
import torch

from shardopt import _C

CUDA = torch.device("cuda" if torch.cuda.is_available() and _C.with_cuda else "cpu")
needs_gpu = pytest.mark.skipif(CUDA.type == "cpu", reason="needs a GPU's streams or memory, and a build with CUDA")


def keep_busy(cycles: int = 3_000_000) -> None:
    """Queues work that makes what follows late, on a GPU."""
    if CUDA.type == "cuda":
        torch.cuda._sleep(cycles)
