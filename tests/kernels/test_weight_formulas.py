"""The formulas of weight formats in PyTorch: exact for every mantissa, and noise that is fair."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shardopt.kernels.weights import bf16_at_random, join_weight, noise, noise_key, split_weight
from slow_cases import slow
from weight_formats import BF16, FP16, every_mantissa, int_bits, special_values

pytestmark = pytest.mark.usefixtures("one_thread")


class Word(NamedTuple):
    """A weight as its format defines it, computed in float64.

    Attributes:
        unit: of the last place of the parameter's dtype where the weight is.
        value: of parameter and low bits together.
        nearest: the parameter.
    """

    unit: Tensor
    value: Tensor
    nearest: Tensor


def word_of(x: Tensor, dtype: torch.dtype, low_bits: int) -> Word:
    """The word of finite weights >= 0: rounded to nearest even, clamped to finite; the parameter away from zero."""
    info = torch.finfo(dtype)
    wide = x.double()
    exponent = torch.frexp(wide.clamp(min=info.smallest_normal)).exponent - 1
    last_place = torch.ldexp(torch.full_like(wide, info.eps), exponent)
    word = (wide / last_place * 2**low_bits).round()
    largest = 2.0 ** math.floor(math.log2(info.max)) * (2 - max(info.eps / 2**low_bits, 2.0**-23))
    value = (word * last_place / 2**low_bits).clamp(max=largest)
    nearest = (value / last_place + 0.5).floor() * last_place
    overflows = value >= 2.0 ** math.floor(math.log2(info.max)) * (2 - info.eps / 2)
    return Word(last_place, value, torch.where(overflows, torch.inf, nearest))


#: Biased exponents of float32: its ends and a middle; below, in and above float16's subnormals, its end.
SOME = [*((BF16, e) for e in (0, 127, 254)), *((FP16, e) for e in (101, 109, 112, 127, 142))]
MORE = [*((BF16, e) for e in range(1, 254, 9)), *((FP16, e) for e in (0, 50, *range(98, 145), 254))]


@pytest.mark.parametrize(
    ("dtype", "exponent", "each"),
    [*((*case, 7) for case in SOME), *slow((*case, 1) for case in [*SOME, *MORE])],
    ids=str,
)
def test_splitting_mantissas(dtype: torch.dtype, exponent: int, each: int) -> None:
    """Every seventh: the low 16 bits take all their values, 18 times or more. The slow cases have all mantissas."""
    for x in every_mantissa(exponent)[::each].split(2**17):  # pieces that stay in the processor's caches
        for low_bits, sign in ((8, 1), (16, -1)):
            check_split(x, sign, dtype, low_bits)


def check_split(x: Tensor, sign: int, dtype: torch.dtype, low_bits: int) -> None:
    """Compares with the definition, and the definition with what is promised of it."""
    high, low = split_weight(sign * x, low_bits, dtype)
    back = join_weight(high, low, low_bits)
    unit, value, nearest = word_of(x, dtype, low_bits)
    assert torch.equal(back.double(), sign * value)
    assert torch.equal(high.double(), sign * nearest)
    assert high.dtype == dtype
    assert ((low >= -(2 ** (low_bits - 1))) & (low < 2 ** (low_bits - 1))).all()
    assert torch.equal(back.signbit(), (sign * x).signbit())
    begin, end = {BF16: (0.0, 2.0**127), FP16: (2.0**-17, 2.0**15)}[dtype]
    if x[0] < end:  # the last binade saturates
        assert ((back.double() - sign * x.double()).abs() / unit).max() <= 2.0 ** -(low_bits + 1)
        if low_bits == 16 and x[0] >= begin:
            assert torch.equal(int_bits(back), int_bits(sign * x))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("low_bits", [8, 16])
def test_splitting_special_values(low_bits: int, dtype: torch.dtype) -> None:
    x = special_values()
    high, low = split_weight(x, low_bits, dtype)
    back = join_weight(high, low, low_bits)
    assert torch.equal(back.isnan(), x.isnan())
    assert torch.equal(back.isinf(), x.isinf())
    assert torch.equal(back.isfinite(), x.isfinite())
    assert torch.equal(back.signbit(), x.signbit())
    assert (low[~x.isfinite() | (x == 0)] == 0).all()
    finite = x.isfinite()
    assert torch.equal(back[finite].abs().double(), word_of(x[finite].abs(), dtype, low_bits).value)
    again = split_weight(back, low_bits, dtype)
    assert torch.equal(int_bits(again[0]), int_bits(high))
    assert torch.equal(again[1], low)


@pytest.mark.parametrize("low_bits", [8, 16])
def test_float16_is_infinite_from_where_torch_says(low_bits: int) -> None:
    """The master weight goes on a little; beyond, it stays at the largest."""
    x = torch.tensor([65504.0, 65519.75, 65520.0, 65535.0, 65536.0, 1e30, torch.inf, torch.nan])
    high, low = split_weight(x, low_bits, FP16)
    assert torch.equal(high.nan_to_num(nan=7.0), x.half().nan_to_num(nan=7.0))
    back = join_weight(high, low, low_bits)
    largest = 65536 - {8: 2.0**-3, 16: 2.0**-8}[low_bits]
    assert back[3:7].tolist() == [65535.0, largest, largest, torch.inf]


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
