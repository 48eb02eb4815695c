"""Properties that every codec promises of its codes, each for all scales that can occur.

Which states are refused: tests/state/test_state_dict.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec_cases import KINDS, Kind, M, V, block, largest, reciprocal, seeds, sizes, spreads
from shardopt.codec import CODECS, decode_moments, encode_moments, get_codec
from shardopt.codec.dynamic8 import dynamic_map
from shardopt.kernels.numeric import bits, float_from_bits, square_root

#: The least root of a float32 above zero, 2^-74.5.
LEAST_ROOT = square_root(torch.tensor(2.0**-149))
#: Binary exponents of all scales that can occur.
EXPONENTS = {kind: (math.frexp(kind.least_scale)[1] - 1, 63 if kind.of_roots else 127) for kind in KINDS}
EXPONENTS[Kind("log8", signed=False)] = (-75, 63)


def units(kind: Kind, exponents: Tensor, seed: int) -> Tensor:
    """Scales with these binary exponents, as :meth:`measure` gives them: shape (n, scales per block)."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = 1 + torch.rand(len(exponents), generator=generator)
    top = torch.ldexp(mantissa, exponents)
    if kind != Kind("log8", signed=False):
        return top[:, None]
    top = top.clamp(min=LEAST_ROOT)
    span = (32.0 * 2**23) ** torch.rand(len(exponents), generator=generator).double()
    low = float_from_bits((bits(top) - span).int()).clamp(min=LEAST_ROOT)
    return kind.measure(torch.stack([top, low], dim=-1))


def canonical(kind: Kind) -> Tensor:
    """The codes, -128 (-32768) as -127 (-32767), for which it stands."""
    lowest = kind.twos_complement & (kind.rank(kind.some_codes) == -(2 ** (kind.bits - 1)))
    return torch.where(lowest, kind.some_codes + 1, kind.some_codes)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(seed=seeds, spread=spreads, size=sizes, largest=largest)
@settings(max_examples=30, deadline=None)
def test_a_block(kind: Kind, seed: int, spread: float, size: int, largest: float) -> None:
    """The scale is the largest magnitude or the least scale; codes and values rise with numbers and their signs."""
    x = block(kind, seed, spread, size, largest).sort().values
    scales, wanted = kind.measure(x), float(x.abs().max())
    if wanted > 0 and kind != Kind("log8", signed=False):
        wanted = max(wanted, kind.least_scale)
    assert float(scales[0]) == wanted
    codes = kind.encode(x, scales)
    values = kind.decode(codes, scales)
    assert (kind.rank(codes).diff() >= 0).all()
    assert (values.diff() >= 0).all()
    if kind.signed:
        back = kind.decode(kind.encode(-x, scales), scales)
        if kind.codec == "dynamic8" and scales > 0:  # the map has 1.0 but no -1.0, which is stored as the lowest value
            y, least = x * reciprocal(scales)[0], dynamic_map(signed=True)[0]
            last = dynamic_map(signed=True)[-2:].mean()  # between 1 and the value below
            values, back = torch.where(y > last, -least * scales, values), torch.where(-y > last, -least * scales, back)
        assert torch.equal(values, -back)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_decoded_value_is_coded_as_itself(kind: Kind) -> None:
    """And values rise with the codes."""
    low, high = EXPONENTS[kind]
    scales = units(kind, torch.arange(low, high + 1).repeat(5), seed=0)
    codes, order = canonical(kind), kind.rank(kind.some_codes).argsort()
    values = kind.decode(kind.some_codes.expand(len(scales), -1), scales)
    assert values.isfinite().all()
    assert (values[:, order].diff() >= 0).all()
    again = kind.encode(values, scales)
    assert torch.equal(again, codes.expand_as(again))
    assert torch.equal(kind.decode(again, scales), values)
    distinct = kind.decode(codes, units(kind, torch.tensor([0]), seed=2)).unique()
    assert len(distinct) == len(codes) - kind.twos_complement  # -128 stands for -127


@pytest.mark.parametrize("codec", CODECS)
@given(seed=seeds, spread=spreads, size=sizes, largest=largest | st.sampled_from([2.0**-149, 2.0**-148, 2.0**-126]))
@settings(max_examples=20, deadline=None)
def test_zero_is_zero_and_nothing_else_is(codec: str, seed: int, spread: float, size: int, largest: float) -> None:
    v = block(Kind("fp32", signed=False), seed, spread, size, largest)
    (coded,) = encode_moments(get_codec(codec), [V], [v])
    decoded = decode_moments(get_codec(codec), [V], [coded])
    assert torch.equal(decoded.values[0] == 0, v == 0)
    most = torch.finfo(torch.bfloat16).max if codec == "bf16" else math.inf  # more may round to infinity
    assert decoded.values[0][v <= most].isfinite().all()
    m = block(Kind(codec, signed=True), seed, spread, size, largest)
    (coded,) = encode_moments(get_codec(codec), [M], [m])
    assert (decode_moments(get_codec(codec), [M], [coded]).values[0][m == 0] == 0).all()


@pytest.mark.parametrize("codec", CODECS)
def test_the_least_second_moments_are_not_zero(codec: str) -> None:
    """Beside larger ones: down to the smallest code, whose root may be a third less than what it stands for."""
    tops = 2.0 ** torch.arange(-149, -100, 1 / 64, dtype=torch.float64)
    least = torch.arange(64) * 2.0**-149
    v = torch.cat([tops.float()[:, None], least.expand(len(tops), -1)], dim=1)
    v = v.minimum(v[:, :1])
    (coded,) = encode_moments(get_codec(codec), [V], [v])
    decoded = decode_moments(get_codec(codec), [V], [coded]).values[0]
    assert torch.equal(decoded == 0, v == 0)


# States that are fit to be loaded.


@pytest.mark.parametrize("codec", CODECS)
@given(seed=seeds, spread=spreads, exponent=st.integers(-149, 120), zeros=st.booleans())
@settings(max_examples=15, deadline=None)
def test_what_was_coded_is_sound(codec: str, seed: int, spread: float, exponent: int, zeros: bool) -> None:
    """Moments as Adam's are, alone and together: at any scale, in blocks of zeros, and of fresh state."""
    coder = get_codec(codec)
    v = block(Kind("fp32", signed=False), seed, spread, 128, 2.0**exponent) * (not zeros)
    m = square_root(v) * (torch.rand(128, generator=torch.Generator().manual_seed(seed)) * 14 - 7)
    for moments, values in (([M], [m]), ([V], [v]), ([M, V], [m, v])):
        for moment, (codes, scales) in zip(moments, encode_moments(coder, moments, values), strict=True):
            assert coder.is_sound(codes, codes if scales is None else scales, signed=moment.signed)
            fresh = torch.full_like(codes, coder.zero_code(signed=moment.signed))
            assert coder.is_sound(fresh, codes if scales is None else scales * 0, signed=moment.signed)
