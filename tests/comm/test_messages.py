"""The kernels of messages equal the reference in PyTorch bit for bit, on every instruction set.

tests/kernels/test_cuda_emulated.py has CUDA's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference_messages as reference
from kernel_problem import using
from message_problem import DTYPES, LAYOUTS, check, check_floats, numbers
from shardopt import _C
from shardopt.kernels import messages
from shardopt.kernels.messages import Part


def coded(numel: int) -> messages.Layout:
    return messages.Layout([Part(1, numel, True)])


def round_trip(floats: Tensor) -> Tensor:
    """A row of floats in the form of the wire."""
    layout, out = coded(floats.numel()), torch.empty(floats.numel())
    messages.add_up(messages.encode(floats[None], layout), layout, out=[out])
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", _C.cpu_targets())
def test_cpu(target: str, dtype: torch.dtype) -> None:
    with using(target, threads=1):
        for parts, chunks in LAYOUTS:
            for _, floats in numbers(dtype, chunks * messages.Layout(parts).numel, chunks):
                check(floats, parts, chunks)
        for numel in (1, 127, 128, 1000):
            for terms in (1, 2, 3, 7, 12):
                for _, floats in numbers(dtype, terms * numel, numel):
                    check_floats(floats, terms)


def test_any_number_of_threads() -> None:
    floats, layout = torch.randn(4, 3 * 70_000), messages.Layout([Part(3, 70_000, True)])
    found, sums = [], []
    for threads in (1, 2, 5):
        with using(_C.cpu_targets()[0], threads):
            found.append(messages.encode(floats, layout))
            sums.append(torch.empty(layout.numel))
            messages.add_up(found[-1], layout, out=sums[-1:])
    for message, total in zip(found, sums, strict=True):
        assert torch.equal(message, found[0])
        assert torch.equal(total, sums[0])


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_tensors_at_any_address(offset: int) -> None:
    for dtype in DTYPES:
        floats = torch.randn(offset + 700).to(dtype)[offset:]
        check(floats, [Part(1, 350, True)], 2)
        check_floats(floats, 2)


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
        check(beside.reshape(-1), [Part(1, 2**14, True)], 4)


def test_errors_of_half_a_unit() -> None:
    """A code is within 2^-4 of a number above the scale's smallest normal, and the largest numbers do not overflow."""
    floats = torch.randn(1 << 16) * torch.exp(2 * torch.randn(1 << 16))
    out = round_trip(floats)
    largest = floats.view(-1, 128).abs().amax(1, keepdim=True).expand(-1, 128).reshape(-1)
    normal = floats.abs() >= largest * 2.0**-13
    assert normal.sum() > 50_000
    assert ((out - floats).abs()[normal] <= 2.0**-4 * floats.abs()[normal]).all()
    assert ((out - floats).abs()[~normal] <= 2.0**-17 * largest[~normal]).all()


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20, -1.0])
def test_powers_of_two_change_no_code(scale: float) -> None:
    floats = torch.randn(1000)
    codes, scales = reference.split(messages.encode(floats[None], coded(1000)), 1000)
    scaled_codes, scaled_scales = reference.split(messages.encode(floats[None] * scale, coded(1000)), 1000)
    assert torch.equal(scaled_codes, codes ^ (0x80 if scale < 0 else 0))
    assert torch.equal(scaled_scales.int() - scales.int(), torch.full_like(scales, 0).int() + scale_exponent(scale))


def scale_exponent(scale: float) -> int:
    return int(torch.frexp(torch.tensor(abs(scale))).exponent) - 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_harms_no_neighbour(bad: float) -> None:
    floats = torch.randn(384)
    wanted, actual = (round_trip(floats.index_fill(0, torch.tensor([200]), x)) for x in (0.0, bad))
    assert actual[200].isnan()
    actual[200] = 0.0
    assert torch.equal(actual, wanted)


def test_refused() -> None:
    layout = coded(8)
    with pytest.raises(TypeError, match=r"got a gradient of torch.float64, expected float32, bfloat16 or float16"):
        messages.encode(torch.zeros(1, 8, dtype=torch.float64), layout)
    with pytest.raises(ValueError, match=r"got a gradient of shape \(1, 8\) with strides \(16, 2\), expected a cont"):
        messages.encode(torch.zeros(1, 16)[:, ::2], layout)
    with pytest.raises(RuntimeError, match=r"got a gradient on meta, expected one on cpu"):
        messages.encode(torch.zeros(1, 8, device="meta"), layout)
    with pytest.raises(ValueError, match=r"got a gradient of shape \(1, 9\) .*expected a contiguous one of \(1, 8\)"):
        messages.encode(torch.zeros(1, 9), layout)
    message = messages.encode(torch.zeros(3, 8), layout)
    with pytest.raises(ValueError, match="got 0 sums before 3 terms from number 0 on, and 1 afterwards"):
        messages.add_up(message, layout, out=[torch.empty(8)])
    with pytest.raises(ValueError, match="got 0 sums before 3 terms from number 1 on"):
        messages.add_up(message, layout, first=1, out=[torch.empty(8)] * 2)
    with pytest.raises(ValueError, match="got a layout without blocks"):
        messages.add_up(torch.empty(0, 0), messages.Layout([]))
