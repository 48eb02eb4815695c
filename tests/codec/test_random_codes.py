"""Codes of second moments are chosen at random within a step, so that averages keep their level."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import with_gradient
from reference import dither
from shardopt.codec import get_codec
from shardopt.kernels.numeric import float_from_bits

#: Random bits with all shares of a code step that log8 (15 bits) and bf16 (16 bits) can get.
ALL_SHARES = torch.arange(2**16) << 16


def test_log8_leaves_what_is_on_a_code_and_zero() -> None:
    """Whatever the random bits: of steps from 1 to the widest, and with both extremes."""
    codec, codes = get_codec("log8"), torch.arange(256, dtype=torch.uint8)
    for step in [1, 2, 3, 7, 255, 256, 99_991, (32 << 23) // 254 + 1]:
        scales = torch.tensor([1.0, float(step)])
        roots = codec.decode(codes, scales, signed=False)
        random = torch.cat([ALL_SHARES[::127], ALL_SHARES[-1:]])[:, None].expand(-1, 256)
        assert (codec.encode(roots.expand(len(random), -1), scales, random, signed=False) == codes).all()


def test_log8_chooses_each_neighbour_as_often_as_its_distance_says() -> None:
    codec, scales = get_codec("log8"), torch.tensor([1.0, 4096.0])
    top, share = 127 << 23, torch.tensor([1, 100, 1024, 2048, 4000, 4095])
    roots = float_from_bits((top - 77 * 4096 + share).int())
    codes = codec.encode(roots.expand(2**16, -1), scales, ALL_SHARES[:, None].expand(-1, 6), signed=False)
    assert set(codes.unique().tolist()) == {255 - 77, 255 - 76}
    assert torch.equal((codes == 255 - 76).double().mean(0) * 4096, share.double())


@pytest.mark.parametrize("codec", ["companded8", "dynamic8"])
def test_whatever_the_random_bits_the_largest_of_a_block_and_zero_are_exact(codec: str) -> None:
    """Of blocks of many scales, and what is above zero never becomes zero."""
    units = [1e-9, 1.0, 1e9, 2.0**126 if codec == "dynamic8" else 2.0**63]  # roots are below 2^64
    scales = torch.linspace(1, 1.99, 10_000)[:, None] * torch.tensor(units).repeat(2500)[:, None]
    x = scales * torch.tensor([1.0, 0.0, 1e-9])
    for random in (0, 2**32 - 1, *(ALL_SHARES[::9973].tolist())):
        codes = get_codec(codec).encode(x, scales, torch.full_like(x, random, dtype=torch.int64), signed=False)
        assert (codes == torch.tensor([255, 0, 1])).all()


@pytest.mark.parametrize("codec", ["companded8", "dynamic8"])
def test_means_of_linear_codes_are_exact(codec: str) -> None:
    """To the 14 bits of their shares; in dynamic8 within each decade, and between one and the next."""
    coder, one = get_codec(codec), torch.ones(1)
    values = coder.decode(torch.arange(1, 256, dtype=torch.uint8), one, signed=False).double()
    low, high = values[:-1], values[1:]
    x = (low + (high - low) * torch.linspace(0.05, 0.95, 254)).float()
    codes = coder.encode(x.expand(2**16, -1), one, ALL_SHARES[:, None].expand(-1, 254), signed=False)
    mean = coder.decode(codes, one, signed=False).double().mean(0)
    assert ((mean - x) / (high - low)).abs().max() < 2**-13


def test_bf16_means_are_exact_and_nothing_becomes_zero_or_infinite() -> None:
    codec = get_codec("bf16")
    v = torch.tensor([1.0, 1.001, 3e-39, 7.7e30, 2.0**-149, 0.0, math.inf])
    codes = codec.encode(v.expand(2**16, -1), v, ALL_SHARES[:, None].expand(-1, 7), signed=False).double()
    assert torch.equal(codes.mean(0)[:4], v.double()[:4])
    assert (codes[:, 4] > 0).all()
    assert (codes[:, 5] == 0).all()
    assert codes[:, 6].isinf().all()
    nan = codec.encode(torch.tensor([math.nan]), v, torch.tensor([2**32 - 1]), signed=False)
    assert nan.isnan().all()


def test_random_bits_of_any_two_elements_are_independent_over_steps() -> None:
    """Of neighbours, of elements one above the other in a matrix, and of an element in two steps."""
    steps = 5_000
    for distance in (1, 2, 128, 987, 4096, 16384, 1 << 20):
        pairs = torch.stack([dither(t, torch.tensor([12345, 12345 + distance])) for t in range(1, steps + 1)])
        share = pairs.double() / 2**32
        assert (share.mean(0) - 0.5).abs().max() < 5 / math.sqrt(12 * steps)
        first, second = share[:, 0], share[:, 1]
        for other in (second, first.roll(1)):
            assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 5 / math.sqrt(steps)


@pytest.mark.parametrize(
    ("codec", "spread", "fades"),
    [(codec, 1, fades) for codec in ("log8", "bf16") for fades in (False, True)]
    + [(codec, 0, False) for codec in ("companded8", "dynamic8")],
)
def test_second_moments_keep_their_level(codec: str, spread: float, fades: bool) -> None:
    """Of heavy-tailed gradients, after 1,500 steps.

    Nearest codes would be 8% (log8) and 16% (bf16) too large, 11% (companded8) and 16% (dynamic8) too small.
    """
    generator = torch.Generator().manual_seed(0)
    scale = (spread * torch.randn(32, 320, generator=generator)).exp()
    param = Parameter(torch.zeros(32, 320))
    optimizer = shardopt.AdamW([param], lr=0.0, codec=codec)
    exact = torch.zeros(32, 320, dtype=torch.float64)
    for t in range(1500):
        chi = torch.randn(3, 32, 320, generator=generator).square().mean(0).sqrt()
        gradient = scale * torch.randn(32, 320, generator=generator) / chi * math.exp(-t / 4000 * fades)
        exact = 0.999 * exact + 0.001 * gradient.double().square()
        with_gradient(param, gradient)
        optimizer.step()
    found: Tensor = optimizer.state_dict(dequantize=True)["state"][0]["exp_avg_sq"]
    assert abs(float((found.double() / exact).sqrt().mean()) - 1) < 0.012
