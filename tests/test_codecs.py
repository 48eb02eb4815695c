"""What every codec promises of its codes: the properties, each for all scales that can occur."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec_cases import KINDS, SIGNED, Kind, M, V, block, seeds, sizes, spreads
from shardopt.codec import CODECS, Coded, decode_moments, encode_moments, get_codec
from shardopt.codec.dynamic8 import boundaries, dynamic_map
from shardopt.kernels.numeric import bits, float_from_bits

ALL_CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
EPS = 2.0**-24  # the largest relative error of one float32 operation
SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal


def units(kind: Kind, exponents: Tensor, seed: int) -> Tensor:
    """Scales with these binary exponents, as :meth:`measure` gives them: shape (n, scales per block)."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = 1 + torch.rand(len(exponents), generator=generator)
    top = torch.ldexp(mantissa, exponents)
    if kind != Kind("log8", signed=False):
        return top[:, None]
    span = (32.0 * 2**23) ** torch.rand(len(exponents), generator=generator).double()
    return kind.measure(torch.stack([top, float_from_bits((bits(top) - span).int())], dim=-1))


#: Binary exponents of the scales for which the properties hold: all of float32's, and of roots all of theirs.
EXPONENTS = {
    **dict.fromkeys(KINDS, (-149, 127)),
    Kind("log8", signed=False): (-75, 63),
    Kind("companded8", signed=False): (-75, 63),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_decoded_value_is_coded_as_itself(kind: Kind) -> None:
    low, high = EXPONENTS[kind]
    scales = units(kind, torch.arange(low, high + 1).repeat(20), seed=0)
    values = kind.decode(ALL_CODES.expand(len(scales), 256), scales)
    again = kind.decode(kind.encode(values, scales), scales)
    assert torch.equal(again, values)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(seed=seeds, spread=spreads, size=sizes)
@settings(max_examples=60, deadline=None)
def test_monotone(kind: Kind, seed: int, spread: float, size: int) -> None:
    x = block(kind, seed, spread, size).sort().values
    scales = kind.measure(x)
    codes = kind.encode(x, scales)
    assert (kind.rank(codes).diff() >= 0).all()
    assert (kind.decode(codes, scales).diff() >= 0).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_rise_with_the_codes(kind: Kind) -> None:
    codes = ALL_CODES[kind.rank(ALL_CODES).argsort()]
    low, high = EXPONENTS[kind]
    scales = units(kind, torch.arange(low, high + 1, 3), seed=1)
    values = kind.decode(codes.expand(len(scales), 256), scales)
    assert (values.diff() >= 0).all()
    distinct = kind.decode(codes, units(kind, torch.tensor([0]), seed=2)).unique()
    assert len(distinct) == (255 if kind.signed and kind.codec != "dynamic8" else 256)  # -128 stands for -127


@pytest.mark.parametrize("kind", SIGNED, ids=str)
@given(seed=seeds, spread=spreads, size=sizes)
@settings(max_examples=60, deadline=None)
def test_sign_symmetric(kind: Kind, seed: int, spread: float, size: int) -> None:
    x = block(kind, seed, spread, size)
    scales = kind.measure(x)
    there, back = kind.decode(kind.encode(x, scales), scales), kind.decode(kind.encode(-x, scales), scales)
    symmetric = torch.ones_like(x, dtype=torch.bool)
    if kind.codec == "dynamic8":  # the map has 1.0 but no -1.0, and ties go to the lower value on both sides
        edges = boundaries(dynamic_map(signed=True))
        y = (x / scales.clamp(min=1e-30)).abs()
        symmetric = (y <= edges[-1]) & ~torch.isin(y, edges) & ~torch.isin(-y, edges)
    assert torch.equal(there[symmetric], -back[symmetric])


def test_where_dynamic8_is_not_symmetric() -> None:
    """Only the map's end differs, where -1 is stored as the lowest value."""
    values = dynamic_map(signed=True)
    assert torch.equal(values[:127].flip(0), -values[128:255])
    assert values[127] == 0
    assert values[255] == 1
    kind, one = Kind("dynamic8", signed=True), torch.ones(1)
    assert kind.decode(kind.encode(-one, one), one) == values[0] == -values[254]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(seed=seeds, spread=st.sampled_from([0.0, 1.0, 4.0]), exponent=st.sampled_from([-40, -20, -1, 1, 20, 40]))
@settings(max_examples=60, deadline=None)
def test_powers_of_two_change_no_code(kind: Kind, seed: int, spread: float, exponent: int) -> None:
    x = block(kind, seed, spread, 128)
    scales, scaled = kind.measure(x), kind.measure(x * 2.0**exponent)
    assert torch.equal(scaled[..., :1], scales[..., :1] * 2.0**exponent)
    assert torch.equal(scaled[..., 1:], scales[..., 1:])
    assert torch.equal(kind.encode(x * 2.0**exponent, scaled), kind.encode(x, scales))


@pytest.mark.parametrize("codec", CODECS)
@given(seed=seeds, spread=spreads, size=sizes, exponent=st.sampled_from([-149, -140, -126, -60, 0, 120]))
@settings(max_examples=100, deadline=None)
def test_zero_is_zero_and_nothing_else_is(codec: str, seed: int, spread: float, size: int, exponent: int) -> None:
    v = block(Kind(codec, signed=False), seed, spread, size, 2.0**exponent)
    (coded,) = encode_moments(get_codec(codec), [V], [v])
    decoded = decode_moments(get_codec(codec), [V], [coded])
    assert decoded.root is not None
    assert torch.equal(decoded.root == 0, v == 0)
    # companded8: the square of a root just below 2^-75 is rounded to 0
    exempt = (v == 2.0**-149) if codec == "companded8" else torch.zeros_like(v, dtype=torch.bool)
    assert torch.equal((decoded.values[0] == 0)[~exempt], (v == 0)[~exempt])
    m = block(Kind(codec, signed=True), seed, spread, size, 2.0**exponent)
    (coded,) = encode_moments(get_codec(codec), [M], [m])
    assert (decode_moments(get_codec(codec), [M], [coded]).values[0][m == 0] == 0).all()


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_are_the_zero_code(codec: str) -> None:
    coder = get_codec(codec)
    for moment in (V, M):
        (coded,) = encode_moments(coder, [moment], [torch.zeros(3, 128)])
        assert (coded.codes == coder.zero_code(signed=moment.signed)).all()
        assert coded.scales is None or coded.scales[..., 0].eq(0).all()
        fresh = Coded(torch.full((1, 128), coder.zero_code(signed=moment.signed), dtype=coder.code_dtype), coded.scales)
        if coded.scales is not None:
            fresh = Coded(fresh.codes, torch.zeros(1, coder.scales(signed=moment.signed)))
        assert (decode_moments(coder, [moment], [fresh]).values[0] == 0).all()


# Moments together, and the plain codecs.


@given(seed=seeds, spread=spreads, exponent=st.sampled_from([-40, -20, 0, 20, 40]))
@settings(max_examples=60, deadline=None)
def test_log8_first_moment_is_near_in_units_of_the_root(seed: int, spread: float, exponent: int) -> None:
    """|m' - m| <= u s / 76: z is 127 codes long and at its flattest 0.3 steep."""
    codec = get_codec("log8")
    generator = torch.Generator().manual_seed(seed)
    u = block(Kind("log8", signed=False), seed, spread, 128, 2.0**exponent)
    u = torch.where(u < u.max() * 2.0**-31, 0.0, u)
    v = u * u
    m = torch.randn(128, generator=generator).clamp(-3, 3) * u
    coded = encode_moments(codec, [M, V], [m, v])
    (decoded, _), root = decode_moments(codec, [M, V], coded)
    assert root is not None
    assert coded[0].scales is not None
    bound = root.double() * coded[0].scales.double() / (2 * 127 * 0.3) * (1 + 16 * EPS)
    assert ((decoded.double() - m.double()).abs() <= bound).all()
    assert (decoded[v == 0] == 0).all()


@given(seed=seeds, spread=spreads)
@settings(max_examples=30, deadline=None)
def test_plain_codecs(seed: int, spread: float) -> None:
    x = block(Kind("fp32", signed=True), seed, spread, 128)
    for moment, values in ((M, x), (V, x * x)):
        (coded,) = encode_moments(get_codec("fp32"), [moment], [values])
        assert torch.equal(decode_moments(get_codec("fp32"), [moment], [coded]).values[0], values)
        (coded,) = encode_moments(get_codec("bf16"), [moment], [values])
        (decoded,), _ = decode_moments(get_codec("bf16"), [moment], [coded])
        assert torch.equal(decoded[values == 0], values[values == 0])
        normal = values.abs() >= SMALLEST_NORMAL
        assert ((decoded - values).abs() <= values.abs() * 2.0**-8)[normal].all()


def test_bf16_second_moment_has_a_floor() -> None:
    tiny = torch.tensor([[2.0**-149, 2.0**-140, 0.0]])
    (coded,) = encode_moments(get_codec("bf16"), [V], [tiny])
    assert torch.equal(coded.codes.float() > 0, tiny > 0)


def test_unknown_codec() -> None:
    with pytest.raises(ValueError, match=r"codec: got 'log9', expected one of 'log8'"):
        get_codec("log9")
