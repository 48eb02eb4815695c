"""Gradients as bytes on a GPU: messages and sums have the CPU's bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cuda_device import CUDA
from message_problem import DTYPES, LAYOUTS, assert_same_bits, numbers
from shardopt.kernels import messages
from shardopt.kernels.messages import Part


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_the_cpu(dtype: torch.dtype) -> None:
    """Shows that messages, their sums and what they decode to have the CPU's bits, whatever the layout."""
    layouts = (*LAYOUTS, ((Part(3000, 1000, True), Part(1, 77, False)), 4))
    for parts, chunks in layouts if CUDA.type == "cuda" else layouts[:2]:
        layout = messages.Layout(parts)
        for _, floats in numbers(dtype, chunks * layout.numel, chunks):
            whole = floats.view(chunks, layout.numel)
            on_device, floats_layout = whole.to(CUDA), messages.Layout([Part(1, layout.numel, False)])
            message, found = messages.encode(whole, layout), messages.encode(on_device, layout)
            assert_same_bits(mean(on_device, floats_layout).cpu(), mean(whole, floats_layout))
            assert_same_bits(mean(found, layout).cpu(), mean(message, layout))
            assert_same_bits(decoded(found, layout).cpu(), decoded(message, layout))


def mean(message: Tensor, layout: messages.Layout) -> Tensor:
    """Over the terms of a message and a sum before."""
    before = torch.arange(layout.numel, device=message.device).float()
    out = torch.empty_like(before)
    messages.add_up(message, layout, first=1, sums=[before], mean=out, divisor=len(message) + 1)
    return out


def decoded(message: Tensor, layout: messages.Layout) -> Tensor:
    out = torch.empty(layout.numel, device=message.device)
    messages.add_up(message[:1], layout, out=[out])
    return out
