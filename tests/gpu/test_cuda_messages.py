"""Gradients as bytes on a GPU: messages and sums have the CPU's bytes."""

from __future__ import annotations

import pytest
import torch

from cuda_device import CUDA, needs_cuda
from message_problem import DTYPES, SHAPES, assert_same_bits, numbers
from shardopt.kernels import messages

pytestmark = needs_cuda


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_the_cpu(dtype: torch.dtype) -> None:
    for numel, chunks, chunk_numel in (*SHAPES, (4 * 3_000_000, 4, 3_000_000)):
        for _, floats in numbers(dtype, numel, numel):
            wanted, found = (messages.encode(x, chunks, chunk_numel) for x in (floats, floats.to(CUDA)))
            assert torch.equal(found.cpu(), wanted)
            for terms, size in ((1, numel), (chunks, chunk_numel)):
                total = torch.empty(size, dtype=dtype)
                on_device = torch.empty_like(total, device=CUDA)
                messages.decode_sum(wanted, total, chunk_numel, terms=terms, factor=1 / terms)
                messages.decode_sum(found, on_device, chunk_numel, terms=terms, factor=1 / terms)
                assert_same_bits(on_device.cpu(), total)
