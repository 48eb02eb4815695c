"""Every codec's codes against brute force over all codes, and the tables of codecs and kernels against definitions.

The nearest code is found in float64 in the codec's own metric. The codec's float32 operations may choose the other of
two codes only where both are as near as these operations can tell.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from codec_cases import Kind, block, seeds, sizes, spreads
from helpers import RULES, with_gradient
from shardopt.codec import get_codec
from shardopt.codec.dynamic8 import boundaries, dynamic_map
from shardopt.kernels.numeric import bits, float_from_bits

EPS = 2.0**-24  # the largest relative error of one float32 operation


def excess(distances: Tensor, chosen: Tensor) -> Tensor:
    """How much farther away the chosen codes are than the nearest: ``distances`` (n, codes), ``chosen`` (n,)."""
    return distances.gather(1, chosen[:, None].long())[:, 0] - distances.amin(1)


@given(seed=seeds, spread=spreads, size=sizes)
@settings(max_examples=60, deadline=None)
def test_log8_roots_are_nearest_in_the_bits(seed: int, spread: float, size: int) -> None:
    kind = Kind("log8", signed=False)
    u = block(kind, seed, spread, size)
    u = u[u > 0]
    if not len(u):
        return
    scales = kind.measure(u)
    top, step = int(bits(scales[0:1])), int(scales[1])
    assert 254 * step >= int(min(top - bits(u).min(), 32 << 23)) > 254 * (step - 1) or step == 1
    candidates = top - (254 - torch.arange(255)) * step  # of codes 1 to 255
    distances = (bits(u).double()[:, None] - candidates.double()).abs() / step
    beyond = bits(u) < candidates[0]  # more than 32 octaves down
    codes = kind.encode(u, scales)
    assert (codes[beyond] == 1).all()
    # distance / step: a conversion, a division and a product, on numbers up to 254
    assert excess(distances, codes.int() - 1).max() <= 2 * 254 * 3 * EPS


def assert_nearest_in_z(kind: Kind, x: Tensor, z: Tensor, codes_z: Tensor, floor: int, operations: int) -> None:
    """``z`` of the magnitudes, and of code magnitudes from ``floor`` on."""
    magnitude = kind.rank(kind.encode(x, kind.measure(x))).abs()
    assert (magnitude >= floor).all()
    distances = (z[:, None] - codes_z).abs()
    assert excess(distances, magnitude - floor).max() <= 2 * operations * EPS


@given(seed=seeds, spread=spreads, size=sizes)
@settings(max_examples=60, deadline=None)
def test_companding_is_nearest_in_z(seed: int, spread: float, size: int) -> None:
    for codec in ("log8", "companded8"):
        kind = Kind(codec, signed=True)
        x = block(kind, seed, spread, size)
        if not x.any():
            continue
        y = x.abs().double() / x.abs().max().double()
        z = y * (1.7 - 0.7 * y) if codec == "log8" else 2 * y / (1 + y)
        # y, and z at most 1.7 (2) times as steep; 1.7, 0.7, fma and product; or sum and quotient; times 127
        assert_nearest_in_z(kind, x, z, torch.arange(128).double() / 127, 0, operations=6)


@given(seed=seeds, spread=spreads, size=sizes)
@settings(max_examples=60, deadline=None)
def test_companded8_roots_are_nearest(seed: int, spread: float, size: int) -> None:
    kind = Kind("companded8", signed=False)
    u = block(kind, seed, spread, size)
    if not u.any():
        return
    u = u[u > 0]
    y = u.double() / u.max().double()
    assert_nearest_in_z(kind, u, y, torch.arange(1, 256).double() / 255, 1, operations=2)


@given(seed=seeds, spread=spreads, size=sizes)
@settings(max_examples=60, deadline=None)
def test_dynamic8_is_nearest_with_ties_to_the_lower_code(seed: int, spread: float, size: int) -> None:
    for signed in (True, False):
        kind = Kind("dynamic8", signed)
        x = block(kind, seed, spread, size)
        x = x[x != 0]
        scales = kind.measure(x) if len(x) else torch.ones(1)
        codes = brute_force_dynamic8(x / scales, signed=signed)
        assert torch.equal(kind.encode(x, scales).int(), codes)


def brute_force_dynamic8(y: Tensor, *, signed: bool) -> Tensor:
    """The first of the nearest values. Differences of float32 numbers near a midpoint are exact in float64."""
    distances = np.abs(y.numpy().astype(np.float64)[:, None] - dynamic_map(signed=signed).numpy().astype(np.float64))
    codes = torch.from_numpy(distances.argmin(1)).int()
    return codes if signed else torch.where(y > 0, codes.clamp(min=1), 0)


# The kernels' own tables.


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


def test_log8_table_inverts_z() -> None:
    table = get_codec("log8").table
    assert table is not None
    y = table[:128].double()
    # the slope of z is at most 1.7, and y is rounded to half a unit in the last place
    assert ((y * (1.7 - 0.7 * y) - torch.arange(128).double() / 127).abs() <= 1.7 * EPS * y).all()
    assert y[0] == 0
    assert y[127] == 1 == table[128]
    assert (y.diff() > 0).all()


def test_companded8_table_inverts_z() -> None:
    table = get_codec("companded8").table
    assert table is not None
    y = table[:128].double()
    # the slope of z is at most 2; t, 2 - t and y are rounded
    assert ((2 * y / (1 + y) - torch.arange(128).double() / 127).abs() <= 2 * 3 * EPS * y).all()
    assert y[0] == 0
    assert y[127] == 1 == table[128]


def kernel_codes(x: Tensor, *, signed: bool) -> Tensor:
    """dynamic8 codes from the kernels in units of 1: of ``x``, or of ``x * x`` where unsigned."""
    rows = -(-len(x) // 255)
    gradient = torch.ones(rows, 256)  # the first element of each block makes its scale 1
    gradient[:, 1:] = torch.nn.functional.pad(x, (0, rows * 255 - len(x))).view(rows, 255)
    param = torch.nn.Parameter(torch.zeros_like(gradient))
    hyper = {"weight_decay": 0.0} if signed else {"weight_decay": 0.0, "betas": (0.0, 0.0)}
    case = RULES["momentum" if signed else "adam"]
    optimizer = case.make([param], **hyper, codec="dynamic8", block_size=256, min_quantized_numel=0)
    with_gradient(param, gradient)
    optimizer.step()
    codes = optimizer.state[param]["momentum_buffer_codes" if signed else "exp_avg_sq_codes"]
    return codes[:, 1:].flatten()[: len(x)].int()


def assert_kernel_codes_are_nearest(x: Tensor, *, signed: bool) -> None:
    values = dynamic_map(signed=signed).double()
    y = x if signed else x * x
    nearest = torch.bucketize(y.double(), (values[:-1] + values[1:]) / 2, out_int32=True)
    wanted = nearest if signed else torch.where(y > 0, nearest.clamp(min=1), 0)
    assert torch.equal(kernel_codes(x, signed=signed), wanted)


def test_dynamic8_kernels_on_a_dense_sample() -> None:
    """Floats in [2^-24, 1] at even distances in the bits, and all within 4 of a boundary between codes."""
    first, last = bits(torch.tensor([2.0**-24, 1.0])).tolist()
    sample = torch.arange(first, last + 1, 997, dtype=torch.int32).view(torch.float32)
    near = torch.arange(-4, 5, dtype=torch.int32)
    for signed in (True, False):
        edges = boundaries(dynamic_map(signed=signed)).abs()
        edges = edges if signed else edges.sqrt()
        x = torch.cat([sample, (bits(edges)[:, None] + near).flatten().view(torch.float32)])
        x = torch.cat([x, torch.zeros(1), torch.tensor([2.0**-149, 2.0**-126, 2.0**-60])])
        x = x[x <= 1]
        assert_kernel_codes_are_nearest(torch.cat([x, -x]), signed=signed)


@pytest.mark.slow
@pytest.mark.parametrize("octave", range(-24, 0))
def test_dynamic8_kernels_on_all_floats(octave: int) -> None:
    x = torch.arange(2**23, dtype=torch.int32).view(torch.float32)
    x = float_from_bits(bits(x) + bits(torch.tensor([2.0**octave])))
    assert_kernel_codes_are_nearest(x, signed=True)
    assert_kernel_codes_are_nearest(-x, signed=True)
    assert_kernel_codes_are_nearest(x, signed=False)
