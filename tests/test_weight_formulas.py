"""The formulas of weight formats in PyTorch: exact for every mantissa, and noise that is fair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardopt.kernels.weights import bf16_at_random, join_weight, noise, noise_key, split_weight

FP32 = torch.float32
INFINITY = 0x7F800000


def int_bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def every_mantissa(exponent: int) -> Tensor:
    """All positive floats of a biased exponent; 0: the subnormal ones and zero."""
    return (torch.arange(2**23, dtype=torch.int32) | exponent << 23).view(FP32)


def special_values() -> Tensor:
    """Of every exponent the ends, the middle and both sides of ties; NaN and infinity; all with both signs."""
    mantissas = [0, 1, 127, 128, 129, 383, 384, 385, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x7F7FFF, 0x7FFF7F]
    mantissas += [0x7FFF80, 0x7FFFFF]
    magnitudes = torch.arange(256, dtype=torch.int32)[:, None] << 23 | torch.tensor(mantissas, dtype=torch.int32)
    positive = magnitudes.flatten().view(FP32)
    return torch.cat([positive, -positive])


@pytest.mark.parametrize("exponent", [0, 127, 254])
def test_splitting_every_mantissa(exponent: int) -> None:
    x = every_mantissa(exponent)
    magnitude = int_bits(x).long()
    for low_bits, sign in ((8, 1), (16, -1)):
        high, low = split_weight(sign * x, low_bits)
        unit = 2 ** (16 - low_bits)
        word = (magnitude.double() / unit).round().long()  # ties to even
        if exponent == 254:
            word.clamp_(max=INFINITY // unit - 1)  # stays finite
        assert torch.equal(int_bits(join_weight(high, low, low_bits)), int_bits(sign * (word * unit).int().view(FP32)))
        nearest = (word.double() / 2**low_bits + 0.5).floor().long()  # ties away from zero
        assert torch.equal(int_bits(high.abs()).long(), nearest)
        assert ((low >= -(2 ** (low_bits - 1))) & (low < 2 ** (low_bits - 1))).all()
        if exponent < 254:
            error = (word * unit - magnitude).abs().max()
            assert error <= (128 if low_bits == 8 else 0)  # of 2^16: the last place of a bfloat16


@pytest.mark.parametrize("low_bits", [8, 16])
def test_splitting_special_values(low_bits: int) -> None:
    x = special_values()
    high, low = split_weight(x, low_bits)
    back = join_weight(high, low, low_bits)
    assert torch.equal(back.isnan(), x.isnan())
    assert torch.equal(back.isinf(), x.isinf())
    assert torch.equal(back.isfinite(), x.isfinite())
    assert torch.equal(back.signbit(), x.signbit())
    assert (low[~x.isfinite() | (x == 0)] == 0).all()
    if low_bits == 16:
        assert torch.equal(int_bits(back)[~x.isnan()], int_bits(x)[~x.isnan()])
    again = split_weight(back, low_bits)
    assert torch.equal(int_bits(again[0]), int_bits(high))
    assert torch.equal(again[1], low)


def test_noise_depends_on_all_that_it_should() -> None:
    """And its bits are fair: of 2^18 draws each bit is set half of the time, within 5 standard deviations."""
    elements = torch.arange(2**18)
    draws = {
        "one": noise(noise_key(0, 0), 1, elements),
        "other seed": noise(noise_key(1, 0), 1, elements),
        "other parameter": noise(noise_key(0, 1), 1, elements),
        "other step": noise(noise_key(0, 0), 2, elements),
        "other elements": noise(noise_key(0, 0), 1, elements + 2**18),
    }
    for name, draw in draws.items():
        for bit in range(32):
            assert abs(int((draw >> bit & 1).sum()) - 2**17) < 5 * 2**8, (name, bit)
        same = [int(((draw ^ other) & 0xFFFF == 0).sum()) for key, other in draws.items() if key != name]
        assert max(same) < 4 + 5 * 2, name  # 4 are expected
    assert torch.equal(draws["one"], noise(noise_key(0, 0), 1, elements))


def test_nothing_but_numbers_is_rounded_at_random() -> None:
    x = special_values()
    for random in (0, 0xFFFF):
        rounded = bf16_at_random(x, torch.full(x.shape, random))
        assert torch.equal(rounded.isnan(), x.isnan())
        assert torch.equal(rounded[x.isinf()], x[x.isinf()].bfloat16())
        low, high = (int_bits(x) >> 16).short(), ((int_bits(x) + 0xFFFF) >> 16).short()
        wanted = high if random else low
        assert torch.equal(int_bits(rounded)[x.isfinite()], wanted[x.isfinite()])
