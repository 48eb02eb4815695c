"""Norms, clipped gradients and steps that clip on a GPU: the CPU's bits, without waiting for the device."""

from __future__ import annotations

import math

import pytest
import torch

import cuda_emulated
from cuda_device import CUDA, needs_gpu
from message_problem import DTYPES, numbers
from shardopt import clip_grad_norm_


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_the_cpu(dtype: torch.dtype) -> None:
    """Shows that norms and clipped gradients have the CPU's bits, finite or not."""
    for numel in (2, 1030, 3_000_000)[: 3 if CUDA.type == "cuda" else 2]:
        for name, floats in numbers(dtype, numel, numel):
            gradients = [floats, floats[1 : numel // 2], floats.view(-1, 2).t()]
            wanted = cuda_emulated.clipped(gradients)
            actual = cuda_emulated.clipped([gradient.to(CUDA) for gradient in gradients])
            for one, expected in zip(actual, wanted, strict=True):
                torch.testing.assert_close(one.cpu(), expected, rtol=0, atol=0, equal_nan=True, msg=name)


@needs_gpu
def test_nothing_waits() -> None:
    """Shows that clipping never waits for the device."""
    params = [torch.nn.Parameter(torch.zeros(300, 40, device=CUDA)) for _ in range(5)]
    for step in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            for kind in (2.0, math.inf):
                clip_grad_norm_(params, 0.5, kind)
        finally:
            torch.cuda.set_sync_debug_mode("default")
