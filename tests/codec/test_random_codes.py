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


@pytest.mark.parametrize("codec", ["log8", "bf16"])
@pytest.mark.parametrize("fades", [False, True])
def test_second_moments_keep_their_level(codec: str, fades: bool) -> None:
    """Of heavy-tailed gradients, after 1,500 steps: nearest codes would be 8% (log8) and 16% (bf16) too large."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn(32, 320, generator=generator).exp()
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
