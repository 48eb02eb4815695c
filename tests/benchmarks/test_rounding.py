"""How far rounding may have moved numbers: against all values that codes can stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import BLOCKWISE
from quality.rounding import is_at_floor, rounded, rounding
from shardopt.codec import CODECS, Moment, encode_moments, get_codec
from shardopt.layout import Shard
from shardopt.state.options import with_defaults
from shardopt.state.slice_spec import SliceSpec

CODERS = [(codec, signed) for codec in (*BLOCKWISE, "log4") for signed in (True, False)]


def all_codes(codec: str) -> Tensor:
    if CODECS[codec].code_dtype == torch.uint8:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


def scales_of(codec: str, *, signed: bool) -> Tensor:
    x = torch.tensor([[1.7, 1e-3, 0.2, 0.0], [2.5e-6, 2e-6, 3e-9, 1e-6]])
    return CODECS[codec].measure(x, signed=signed)


@pytest.mark.parametrize(("codec", "signed"), CODERS)
def test_the_distance_to_the_neighbours(codec: str, signed: bool) -> None:
    own, codes, scales = CODECS[codec], all_codes(codec), scales_of(codec, signed=signed)
    codes = (codes[1:] if codec == "log4" else codes).expand(len(scales), -1)  # 0 is zero of both moments
    x, found = (
        f.numpy() for f in (own.decode(codes, scales, signed=signed), rounding(codec, codes, scales, signed=signed))
    )
    for row in range(len(scales)):
        values = np.unique(x[row] if signed else x[row][x[row] > 0])
        index = np.searchsorted(values, x[row])
        wanted_low = np.where((x[row] == 0) & (not signed), 0, values[np.maximum(index - 1, 0)])
        wanted_high = np.where((x[row] == 0) & (not signed), 0, values[np.minimum(index + 1, len(values) - 1)])
        share = np.float32(1 if codec == "log4" else 0.5)
        np.testing.assert_array_equal(
            found[row], share * np.maximum(x[row] - wanted_low, wanted_high - x[row]).astype(np.float32)
        )


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
        at_floor = is_at_floor(codec, codes, scales)
        assert bool(at_floor.any()) == has_floor
        assert at_floor[x < 0.49 * least].all()
        assert not at_floor[x > 2 * least].any()


def test_moments_in_units_of_a_root() -> None:
    """Errors are in the same units; exact moments have none."""
    moments = (Moment("m", signed=True), Moment("v", signed=False), Moment("x", signed=True, exact=True))
    own, x = get_codec("log8"), torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(2))
    group = with_defaults({"codec": "log8", "block_size": 64, "min_quantized_numel": 0})
    spec = SliceSpec.of(Shard((4, 64), (4, 64)), torch.float32, group, moments)
    (found,) = rounded(spec, spec.encode_local([x[0], x[1].square(), x[2]]))
    m_codes, v_codes = encode_moments(own, moments, [x[0], x[1].square(), x[2]])[:2]
    root = own.decode(*v_codes, signed=False)
    assert torch.equal(found["v"].value, root)
    assert torch.equal(found["m"].value, own.decode(*m_codes, signed=True) * root)
    assert torch.equal(found["m"].error, rounding("log8", *m_codes, signed=True) * root)
    assert torch.equal(found["x"].value, x[2])
    assert not found["x"].error.any()
    assert not found["x"].at_floor.any()
