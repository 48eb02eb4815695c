"""The codes are those of the formulas and the nearest, the kernels' are the same, and the tables are what they should.

Codes only rise with numbers (test_codecs.py), so those are right everywhere that are right around each number at which
one code follows another.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from codec_cases import (
    KINDS,
    Kind,
    M,
    V,
    exact_product,
    nearest_in_dynamic_map,
    numpy_fma,
)
from helpers import EIGHT_BIT, stepped
from reference import dither
from shardopt import _C
from shardopt.codec import encode_moments, get_codec
from shardopt.codec.dynamic8 import dynamic_map
from shardopt.kernels.dispatch import use_cpu_target
from shardopt.kernels.numeric import bits, float_from_bits

NEAR = torch.arange(-64, 65, dtype=torch.int32)
LOG8_ROOTS = Kind("log8", signed=False)


def by_the_formula(kind: Kind, x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The codes of magnitudes above zero as docs/codecs.md defines them, by NumPy's float32 operations: float64."""
    return _by_the_formula(kind, x, scales).astype(np.float64)


def _by_the_formula(kind: Kind, x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    f = np.float32
    scale = scales[..., :1]
    if kind == LOG8_ROOTS:
        below = (x.view(np.int32) - scale.view(np.int32)).astype(np.float32)
        return np.maximum(np.rint(exact_product(below, f(1) / scales[..., 1:]) + 255), 1)
    inverse = f(1) / scale
    if kind == Kind("log8", signed=True):
        y = x * inverse
        return np.rint(exact_product(y, numpy_fma(f(-0.7) * f(127), y, f(1.7) * f(127))))
    if kind == Kind("companded16", signed=True):
        y = x * inverse
        return np.rint(exact_product(f(65534) * y, f(1) / (y + f(1))))
    if kind.bits == 16:
        return np.maximum(np.rint(exact_product(x, f(65535) * inverse)), 1)
    if kind.signed:
        return np.rint(exact_product(x * (f(254) * inverse), f(1) / numpy_fma(x, inverse, f(1))))
    return np.maximum(np.rint(exact_product(x, f(255) * inverse)), 1)


def midpoints(kind: Kind, tops: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of blocks with these largest magnitudes, the bits halfway between two codes, and the lower of these."""
    if kind == LOG8_ROOTS:
        lowest = tops * torch.tensor([1 - 2.0**-17, 1 - 2.0**-16, 0.9, 0.1, 1e-5, 1e-12])  # steps 1, 2 and more
        scales = torch.cat([kind.measure(torch.stack([top, low])) for top, low in zip(tops, lowest, strict=True)])
        octaves = (bits(tops) - bits(lowest)).clamp(max=32 << 23)
        assert torch.equal(scales[1::2], (-(-octaves // 254)).clamp(min=1).float())
        scales = scales.view(-1, 1, 2)
        assert kind.encode(lowest[-1], scales[-1, 0]) == 1  # more than 32 octaves down
        below = torch.arange(254)
        return scales, bits(scales[..., 0]) - ((below + 0.5) * scales[..., 1]).int(), 254 - below
    largest = 2 ** (kind.bits - kind.signed) - 1
    lower = torch.arange(0, largest, 1 if kind.bits == 8 else 101)
    half = (lower.double() + 0.5) / largest
    if kind == Kind("log8", signed=True):
        half = (1.7 - (1.7**2 - 2.8 * half).sqrt()) / 1.4
    elif kind.signed:
        half = half / (2 - half)
    return tops[:, None, None], bits((tops.double()[:, None] * half).float()), lower


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.codec != "dynamic8"], ids=str)
def test_codes_near_every_midpoint(kind: Kind) -> None:
    """The codes of the formula, which are the nearest: another order of operations or rounding gives others."""
    tops = torch.tensor([1.0, 255.0, 254.0, 1.7, 3.3e-5, 0.77e9])
    scales, middles, lower = midpoints(kind, tops)
    x = float_from_bits(middles[:, :, None] + NEAR)
    x = x.flatten(1).minimum(scales[:, 0, :1])[:, None, :]
    wanted = torch.from_numpy(by_the_formula(kind, x.numpy(), scales.numpy())).int()
    assert torch.equal(kind.rank(kind.encode(x, scales)), wanted)
    if kind.signed:
        assert torch.equal(kind.rank(kind.encode(-x, scales)), -wanted)
    ends = wanted.view(len(tops), -1, len(NEAR))[..., [0, -1]]
    ends = ends[scales[:, 0, -1] > 256] if kind == LOG8_ROOTS else ends  # of smaller steps several codes are so near
    assert (ends == torch.stack([lower, lower + 1], dim=-1).clamp(min=0 if kind.signed else 1)).all()


@pytest.mark.parametrize("target", _C.cpu_targets())
@pytest.mark.parametrize("codec", EIGHT_BIT)
def test_kernels_code_blocks_of_every_scale_as_python_does(codec: str, target: str) -> None:
    """The bits are the same, those of scales included."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(-149, 128)
    spread = torch.tensor([0.0, 1.0, 4.0, 20.0])[exponents % 4, None]
    x = torch.randn((len(exponents), 256), generator=generator).double()
    x = x * (spread * torch.randn(x.shape, generator=generator)).exp()
    x = torch.ldexp(x / x.abs().amax(1, keepdim=True), exponents[:, None]).float()
    squared = x[exponents < 64]  # squares beyond are infinite
    with use_cpu_target(target):
        one, two = stepped(x, "momentum", codec), stepped(squared, "adam", codec, betas=(0.0, 0.0))
    (momentum,) = encode_moments(get_codec(codec), [M], [x])
    random = dither(1, torch.arange(squared.numel()).view_as(squared))
    first, second = encode_moments(get_codec(codec), [M, V], [squared, squared * squared], random=random)
    cases = (one, "momentum_buffer", momentum), (two, "exp_avg", first), (two, "exp_avg_sq", second)
    for state, name, wanted in cases:
        assert wanted.scales is not None
        assert torch.equal(state[f"{name}_scales"].flatten(), wanted.scales.flatten())
        assert torch.equal(state[f"{name}_codes"], wanted.codes)


# dynamic8.


def test_dynamic_maps_are_those_of_the_paper() -> None:
    """Sums, first values and digests of the maps as the paper's own package makes them."""
    for signed, total, squares, first, digest in (
        (True, 1.0, 48.5958376673, (-0.99296874, -0.97890627, -0.96484375), "e732639a65f497b4"),
        (False, 75.1052632434, 48.5974521051, (0.0, 3.25e-7, 7.75e-7), "305f002cc11278fb"),
    ):
        values = dynamic_map(signed=signed)
        assert values.shape == (256,)
        assert values.double().sum().item() == pytest.approx(total, abs=1e-9)
        assert values.double().square().sum().item() == pytest.approx(squares, abs=1e-9)
        assert values[:3].tolist() == pytest.approx(first, rel=1e-7)
        assert hashlib.sha256(values.numpy().astype("<f4").tobytes()).hexdigest().startswith(digest)
    assert dynamic_map(signed=True)[127] == 0


#: In spaces: how far from the midpoint of two neighbours of a decade dynamic8 may still choose the farther one.
NEAR_MIDPOINT = 1.25 * 2.0**-16


@lru_cache
def near_steps_of_dynamic8(*, signed: bool) -> tuple[Tensor, Tensor]:
    """All floats in (0, 1] within 64 of a midpoint, of the start of a decade and of a power of two, and their codes.

    Between two of these steps the code is the same all along, as lines only rise: it is right if it is so at both. The
    two tensors have the shape ``(steps, 129)``, midpoints first.
    """
    magnitudes = dynamic_map(signed=signed)[127 if signed else 0 :].double()
    starts = torch.tensor([*(10.0**-d for d in range(9)), *(2.0**-e for e in range(1, 41))])
    steps = torch.cat([((magnitudes[:-1] + magnitudes[1:]) / 2).float(), starts])
    y = float_from_bits(bits(steps)[:, None] + NEAR).clamp(max=1)
    return y, get_codec("dynamic8").encode(y, torch.ones(1), signed=signed).int()


@pytest.mark.parametrize(("signed", "sign"), [(True, 1), (True, -1), (False, 1)])
def test_dynamic8_near_every_step(signed: bool, sign: int) -> None:
    """Where the code is not the nearest, it is the neighbour across a midpoint that is as near as the lines can tell.

    The neighbour is farther away by twice the distance to the midpoint.
    """
    y = sign * near_steps_of_dynamic8(signed=signed)[0]
    codes = get_codec("dynamic8").encode(y, torch.ones(1), signed=signed).int()
    assert (sign * codes.diff() >= 0).all()
    nearest = nearest_in_dynamic_map(y.flatten(), signed=signed).view_as(y)
    values = dynamic_map(signed=signed).double()
    chosen, best = values[codes.long()], values[nearest.long()]
    assert ((codes - nearest).abs() <= 1).all()
    excess = (y.double() - chosen).abs() - (y.double() - best).abs()
    assert (excess <= 2 * NEAR_MIDPOINT * (chosen - best).abs()).all()


@pytest.mark.parametrize("target", _C.cpu_targets())
def test_dynamic8_kernels_near_every_step(target: str) -> None:
    """Of first moments, in rows of 256 numbers of which the first is 1; second moments have another table only."""
    y, codes = near_steps_of_dynamic8(signed=True)
    mirrored = torch.where(codes == 255, 0, 254 - codes)  # there is a 1 but no -1
    for x, wanted in ((y, codes), (-y, mirrored)):
        rows = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 255)).view(-1, 255)
        with use_cpu_target(target):
            state = stepped(torch.cat([torch.ones(len(rows), 1), rows], 1), "momentum", "dynamic8")
        found = state["momentum_buffer_codes"][:, 1:].flatten()[: x.numel()]
        assert torch.equal(found.int(), wanted.flatten())
