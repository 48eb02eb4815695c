"""log8's and companded8's codes against brute force over all codes, the kernels' against these, and the tables.

The nearest code is found in float64 in the codec's own metric. The codec's float32 operations may choose the other of
two codes only where both are as near as these operations can tell. For dynamic8: test_dynamic8_brute_force.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from codec_cases import (
    EPS,
    KINDS,
    Kind,
    M,
    V,
    block,
    exact_product,
    largest,
    numpy_fma,
    reciprocal,
    seeds,
    sizes,
    spreads,
)
from helpers import EIGHT_BIT, stepped
from shardopt import _C
from shardopt.codec import encode_moments, get_codec
from shardopt.kernels.dispatch import use_cpu_target
from shardopt.kernels.numeric import bits, float_from_bits


def excess(distances: Tensor, chosen: Tensor) -> Tensor:
    """How much farther away the chosen codes are than the nearest: ``distances`` (n, codes), ``chosen`` (n,)."""
    return distances.gather(1, chosen[:, None].long())[:, 0] - distances.amin(1)


@given(seed=seeds, spread=spreads, size=sizes, largest=largest)
@settings(max_examples=60, deadline=None)
def test_log8_roots_are_nearest_in_the_bits(seed: int, spread: float, size: int, largest: float) -> None:
    kind = Kind("log8", signed=False)
    u = block(kind, seed, spread, size, largest)
    u = u[u > 0]
    if not len(u):
        return
    scales = kind.measure(u)
    assert scales[0] == u.max()
    top, step = int(bits(scales[0:1])), int(scales[1])
    assert 254 * step >= int(min(top - bits(u).min(), 32 << 23)) > 254 * (step - 1) or step == 1
    candidates = top - (254 - torch.arange(255)) * step  # of codes 1 to 255
    distances = (bits(u).double()[:, None] - candidates.double()).abs() / step
    beyond = bits(u) < candidates[0]  # more than 32 octaves down
    codes = kind.encode(u, scales)
    assert (codes[beyond] == 1).all()
    # a conversion and a reciprocal: their product is exact until it is rounded to a whole number
    error = 2 * EPS * (top - bits(u)).double() / step
    assert (excess(distances, codes.int() - 1) <= 2 * error).all()


def assert_nearest_in_z(kind: Kind, x: Tensor, scales: Tensor, z: Tensor, codes_z: Tensor, error: Tensor) -> None:
    """``z`` of the magnitudes and of all code magnitudes, and the relative error of the ``z`` that is rounded."""
    magnitude = kind.rank(kind.encode(x, scales)).abs()
    subnormal = 2.0**-140  # results this small are less exact
    assert (excess((z[:, None] - codes_z).abs(), magnitude) <= 2 * error * z + subnormal).all()


@given(seed=seeds, spread=spreads, size=sizes, largest=largest)
@settings(max_examples=100, deadline=None)
def test_companding_is_nearest_in_z(seed: int, spread: float, size: int, largest: float) -> None:
    for codec in ("log8", "companded8"):
        kind = Kind(codec, signed=True)
        x = block(kind, seed, spread, size, largest)
        if not x.any():
            continue
        scales = kind.measure(x)
        _, inverse_error = reciprocal(scales)
        y = x.abs().double() / scales.double()
        if codec == "log8":
            z = y * (1.7 - 0.7 * y)
            # relative to z: of y (z is at most as steep as a line through zero) the reciprocal and a product; of the
            # two factors of 127 two roundings each, which the difference makes (1.7 + 0.7) / (1.7 - 0.7) times as
            # large at most; the fma
            error = inverse_error + (1 + 2 * 2.4 + 1.01) * EPS
        else:
            z = 2 * y / (1 + y)
            # the reciprocal, whose errors above and below in part cancel; two products; the fma and its reciprocal
            error = inverse_error + (2 + 1 + 1.01) * EPS
        assert_nearest_in_z(kind, x, scales, z, torch.arange(128).double() / 127, error)


@given(seed=seeds, spread=spreads, size=sizes, largest=largest)
@settings(max_examples=60, deadline=None)
def test_companded8_roots_are_nearest(seed: int, spread: float, size: int, largest: float) -> None:
    kind = Kind("companded8", signed=False)
    u = block(kind, seed, spread, size, largest)
    u = u[u > 0]
    if not len(u):
        return
    scales = kind.measure(u)
    y = u.double() / scales.double()
    codes_y = torch.arange(256).double() / 255
    codes_y[0] = -1  # never nearest
    assert_nearest_in_z(kind, u, scales, y, codes_y, torch.tensor(2.01 * EPS))  # a reciprocal and a product


def by_the_formula(kind: Kind, x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The codes of magnitudes above zero as the README defines them, by NumPy's float32 operations: float64."""
    return _by_the_formula(kind, x, scales).astype(np.float64)


def _by_the_formula(kind: Kind, x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    f = np.float32
    scale = scales[..., :1]
    if kind == Kind("log8", signed=False):
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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.codec != "dynamic8"], ids=str)
def test_codes_near_every_midpoint_are_those_of_the_formula(kind: Kind) -> None:
    """Where operations in another order, or another rounding of ties, would give another code."""
    tops = torch.tensor([1.0, 255.0, 254.0, 1.7, 3.3e-5, 0.77e9])
    if kind == Kind("log8", signed=False):
        lowest = tops * torch.tensor([1 - 2.0**-17, 1 - 2.0**-16, 0.9, 0.1, 1e-5, 1e-12])  # steps 1, 2 and more
        scales = torch.cat([kind.measure(torch.stack([top, low])) for top, low in zip(tops, lowest, strict=True)])
        scales = scales.view(-1, 1, 2)
        middles = bits(scales[..., 0]) - ((torch.arange(254) + 0.5) * scales[..., 1]).int()
    else:
        scales = tops[:, None, None]
        largest = 2 ** (kind.bits - kind.signed) - 1
        half = (torch.arange(0, largest, 1 if kind.bits == 8 else 101).double() + 0.5) / largest
        if kind == Kind("log8", signed=True):
            half = (1.7 - (1.7**2 - 2.8 * half).sqrt()) / 1.4
        elif kind.signed:
            half = half / (2 - half)
        middles = bits((tops.double()[:, None] * half).float())
    x = float_from_bits(middles[:, :, None] + torch.arange(-64, 65, dtype=torch.int32))
    x = x.flatten(1).minimum(scales[:, 0, :1])[:, None, :]
    wanted = torch.from_numpy(by_the_formula(kind, x.numpy(), scales.numpy())).int()
    assert torch.equal(kind.rank(kind.encode(x, scales)), wanted)
    if kind.signed:
        assert torch.equal(kind.rank(kind.encode(-x, scales)), -wanted)


@pytest.mark.parametrize("target", _C.cpu_targets())
@pytest.mark.parametrize("codec", EIGHT_BIT)
def test_kernels_code_blocks_of_every_scale_as_python_does(codec: str, target: str) -> None:
    """The codes are brute force's on the Python side; here the bits must be the same, scales included."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(-149, 128)
    spread = torch.tensor([0.0, 1.0, 4.0, 20.0])[exponents % 4, None]
    x = torch.randn((len(exponents), 256), generator=generator).double()
    x = x * (spread * torch.randn(x.shape, generator=generator)).exp()
    x = torch.ldexp(x / x.abs().amax(1, keepdim=True), exponents[:, None]).float()
    (wanted,) = encode_moments(get_codec(codec), [M], [x])
    with use_cpu_target(target):
        state = stepped(x, "momentum", codec)
    assert wanted.scales is not None
    assert torch.equal(state["momentum_buffer_scales"].flatten(), wanted.scales.flatten())
    assert torch.equal(state["momentum_buffer_codes"], wanted.codes)

    x = x[exponents < 64]  # squares beyond are infinite
    coded = encode_moments(get_codec(codec), [M, V], [x, x * x])
    with use_cpu_target(target):
        state = stepped(x, "adam", codec, betas=(0.0, 0.0))
    for name, wanted in zip(("exp_avg", "exp_avg_sq"), coded, strict=True):
        assert wanted.scales is not None
        assert torch.equal(state[f"{name}_scales"].flatten(), wanted.scales.flatten())
        assert torch.equal(state[f"{name}_codes"], wanted.codes)


# The tables that invert z.


#: z of the table's y, and the steepest slope times the roundings of y.
TABLES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "log8": (lambda y: y * (1.7 - 0.7 * y), 1.7),
    "companded8": (lambda y: 2 * y / (1 + y), 2 * 3),  # t, 2 - t and y are rounded
}


@pytest.mark.parametrize("codec", TABLES)
def test_the_table_inverts_z(codec: str) -> None:
    table, (z, most) = get_codec(codec).table, TABLES[codec]
    assert table is not None
    y = table[:128].double()
    assert ((z(y) - torch.arange(128).double() / 127).abs() <= most * EPS * y).all()
    assert y[0] == 0
    assert y[127] == 1 == table[128]
    assert (y.diff() > 0).all()
