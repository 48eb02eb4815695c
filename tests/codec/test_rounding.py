"""Neighbouring codes, and how far rounding may have moved numbers: against all values that codes can stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import BLOCKWISE
from shardopt.codec import CODECS, Moment, encode_moments, get_codec, rounded_moments

CODERS = [(codec, signed) for codec in (*BLOCKWISE, "log4") for signed in (True, False)]


def all_codes(codec: str) -> Tensor:
    if CODECS[codec].code_dtype == torch.uint8:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


def scales_of(codec: str, *, signed: bool) -> Tensor:
    x = torch.tensor([[1.7, 1e-3, 0.2, 0.0], [2.5e-6, 2e-6, 3e-9, 1e-6]])
    return CODECS[codec].measure(x, signed=signed)


@pytest.mark.parametrize(("codec", "signed"), CODERS)
def test_neighbours_and_the_distance_to_them(codec: str, signed: bool) -> None:
    own, codes, scales = CODECS[codec], all_codes(codec), scales_of(codec, signed=signed)
    codes = (codes[1:] if codec == "log4" else codes).expand(len(scales), -1)  # 0 is zero of both moments
    below, above = own.neighbours(codes, signed=signed)
    low, x, high = (own.decode(c, scales, signed=signed).numpy() for c in (below, codes, above))
    rounding = own.rounding(codes, scales, signed=signed).numpy()
    for row in range(len(scales)):
        values = np.unique(x[row] if signed else x[row][x[row] > 0])
        index = np.searchsorted(values, x[row])
        wanted_low = np.where((x[row] == 0) & (not signed), 0, values[np.maximum(index - 1, 0)])
        wanted_high = np.where((x[row] == 0) & (not signed), 0, values[np.minimum(index + 1, len(values) - 1)])
        np.testing.assert_array_equal(low[row], wanted_low)
        np.testing.assert_array_equal(high[row], wanted_high)
        share = np.float32(1 if codec == "log4" else 0.5)
        np.testing.assert_array_equal(
            rounding[row], share * np.maximum(x[row] - wanted_low, wanted_high - x[row]).astype(np.float32)
        )


def test_neighbours_in_log4_leave_the_other_moment_as_it_is() -> None:
    own, codes = get_codec("log4"), all_codes("log4")
    for signed in (True, False):
        scales = scales_of("log4", signed=not signed)[:1]
        other = own.decode(codes, scales, signed=not signed)
        for neighbour in own.neighbours(codes, signed=signed):
            assert torch.equal(own.decode(neighbour, scales, signed=not signed), other)


@pytest.mark.parametrize(("codec", "signed"), CODERS)
def test_numbers_lie_between_the_neighbours_of_their_codes(codec: str, signed: bool) -> None:
    own = CODECS[codec]
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).exp2()
    x = x * torch.where(torch.arange(64) % 2 == 0, 1, -1) if signed else x
    scales = own.measure(x, signed=signed)
    codes = own.encode(x, scales, signed=signed)
    if signed and own.shared:
        codes = codes + 1  # a level above zero of the other moment, without which there is no first one
    below, above = own.neighbours(codes, signed=signed)
    low, value, high = (own.decode(c, scales, signed=signed) for c in (below, codes, above))
    inner = (low < value) & (value < high)
    assert inner.float().mean() > 0.8
    assert ((low < x) & (x < high))[inner].all()


#: Roots over 40 octaves: beyond the range of every codec.
WIDE = torch.logspace(0, -40, 128, base=2)[None]
#: Roots within the range of every codec, the least an eighth of the largest.
NARROW = torch.linspace(1, 0.125, 128)[None]


@pytest.mark.parametrize("codec", [*BLOCKWISE, "log4"])
def test_the_floor(codec: str) -> None:
    own = CODECS[codec]
    for x, has_floor in ((WIDE, True), (NARROW, False)):
        scales = own.measure(x, signed=False)
        codes = own.encode(x, scales, signed=False)
        least = own.decode(torch.ones(1, dtype=codes.dtype), scales, signed=False)
        at_floor = own.at_floor(codes, scales)
        assert bool(at_floor.any()) == has_floor
        assert at_floor[x < 0.49 * least].all()
        assert not at_floor[x > 2 * least].any()


def test_moments_in_units_of_a_root() -> None:
    """Errors are in the same units; exact moments have none."""
    moments = [Moment("m", signed=True), Moment("v", signed=False), Moment("x", signed=True, exact=True)]
    own, x = get_codec("log8"), torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(2))
    coded = encode_moments(own, moments, [x[0], x[1].square(), x[2]])
    m, v, exact = rounded_moments(own, moments, coded)
    root = own.decode(coded[1].codes, coded[1].scales, signed=False)
    assert torch.equal(v.value, root)
    assert torch.equal(m.value, own.decode(coded[0].codes, coded[0].scales, signed=True) * root)
    assert torch.equal(m.error, own.rounding(coded[0].codes, coded[0].scales, signed=True) * root)
    assert torch.equal(exact.value, x[2])
    assert not exact.error.any()
    assert not exact.at_floor.any()
