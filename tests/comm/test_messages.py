"""The kernels of messages equal the reference in PyTorch bit for bit, on every instruction set.

tests/kernels/test_cuda_emulated.py has CUDA's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference_messages as reference
from kernel_problem import using
from message_problem import DTYPES, SHAPES, check, numbers
from shardopt import _C
from shardopt.kernels import messages


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", _C.cpu_targets())
def test_cpu(target: str, dtype: torch.dtype) -> None:
    with using(target, threads=1):
        for numel, chunks, chunk_numel in SHAPES:
            for _, floats in numbers(dtype, numel, numel):
                check(floats, chunks, chunk_numel)


def test_any_number_of_threads() -> None:
    floats = torch.randn(4 * 70_000)
    messages_of, sums = [], []
    for threads in (1, 2, 5):
        with using(_C.cpu_targets()[0], threads):
            messages_of.append(messages.encode(floats, 4, 70_000))
            sums.append(torch.empty(70_000))
            messages.decode_sum(messages_of[-1], sums[-1], 70_000, terms=4)
    for message, total in zip(messages_of, sums, strict=True):
        assert torch.equal(message, messages_of[0])
        assert torch.equal(total, sums[0])


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_tensors_at_any_address(offset: int) -> None:
    for dtype in DTYPES:
        floats = torch.randn(offset + 700).to(dtype)[offset:]
        check(floats, 2, 350)


def every_bfloat16() -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).short().view(torch.bfloat16)


def test_every_bfloat16_beside_every_largest() -> None:
    """All bfloat16 numbers in turn, below block maxima of every exponent: nothing finite becomes NaN or grows."""
    every = every_bfloat16()
    blocks = every.view(-1, 128)
    for exponent in range(-130, 128, 7):
        largest = torch.tensor(1.9375 * 2.0**exponent).bfloat16()
        beside = torch.where(blocks.abs() <= largest, blocks, 0.0)
        beside[:, 0] = largest
        check(beside.reshape(-1), 4, 2**14)


def test_errors_of_half_a_unit() -> None:
    """A code is within 2^-4 of a number above the scale's smallest normal, and the largest numbers do not overflow."""
    floats = torch.randn(1 << 16) * torch.exp(2 * torch.randn(1 << 16))
    out = torch.empty_like(floats)
    messages.decode_sum(messages.encode(floats, 1, floats.numel()), out, floats.numel())
    largest = floats.view(-1, 128).abs().amax(1, keepdim=True).expand(-1, 128).reshape(-1)
    normal = floats.abs() >= largest * 2.0**-13
    assert normal.sum() > 50_000
    assert ((out - floats).abs()[normal] <= 2.0**-4 * floats.abs()[normal]).all()
    assert ((out - floats).abs()[~normal] <= 2.0**-17 * largest[~normal]).all()


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20, -1.0])
def test_powers_of_two_change_no_code(scale: float) -> None:
    floats = torch.randn(1000)
    codes, scales = reference.split(messages.encode(floats, 1, 1000), 1000)
    scaled_codes, scaled_scales = reference.split(messages.encode(floats * scale, 1, 1000), 1000)
    assert torch.equal(scaled_codes, codes ^ (0x80 if scale < 0 else 0))
    assert torch.equal(scaled_scales.int() - scales.int(), torch.full_like(scales, 0).int() + scale_exponent(scale))


def scale_exponent(scale: float) -> int:
    return int(torch.frexp(torch.tensor(abs(scale))).exponent) - 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_harms_no_neighbour(bad: float) -> None:
    floats = torch.randn(384)
    wanted, found = torch.empty(384), torch.empty(384)
    messages.decode_sum(messages.encode(floats.index_fill(0, torch.tensor([200]), 0.0), 1, 384), wanted, 384)
    messages.decode_sum(messages.encode(floats.index_fill(0, torch.tensor([200]), bad), 1, 384), found, 384)
    assert found[200].isnan()
    found[200] = 0.0
    assert torch.equal(found, wanted)


def test_refused() -> None:
    with pytest.raises(TypeError, match=r"got a gradient of torch.float64, expected float32, bfloat16 or float16"):
        messages.encode(torch.zeros(8, dtype=torch.float64), 1, 8)
    with pytest.raises(ValueError, match=r"got a gradient with strides \(2,\), expected a contiguous one"):
        messages.encode(torch.zeros(16)[::2], 1, 8)
    with pytest.raises(RuntimeError, match=r"got a gradient on meta, expected one on cpu"):
        messages.encode(torch.zeros(8, device="meta"), 1, 8)
    with pytest.raises(ValueError, match=r"got 9 elements in 1 chunks of 8"):
        messages.encode(torch.zeros(9), 1, 8)
    with pytest.raises(ValueError, match=r"got a message of shape \(2, 32\), expected a multiple of 2 chunks of 272"):
        messages.decode_sum(messages.encode(torch.zeros(16), 2, 8), torch.zeros(256), 256, terms=2)
