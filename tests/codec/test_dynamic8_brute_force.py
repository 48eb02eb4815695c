"""dynamic8's codes against brute force over all codes and near every step from a code to the next, and its maps.

Of two codes the farther one may be chosen only as near a midpoint as its lines' float32 operations can tell.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from codec_cases import dynamic8_by_the_formula, nearest_in_dynamic_map
from helpers import RULES, stepped, with_gradient
from shardopt import _C
from shardopt.codec import get_codec
from shardopt.codec.dynamic8 import dynamic_map, edges, lines
from shardopt.kernels.dispatch import use_cpu_target
from shardopt.kernels.numeric import bits, float32, float_from_bits, fma


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


def assert_nearest_in_dynamic_map(y: Tensor, codes: Tensor, nearest: Tensor, *, signed: bool) -> None:
    """Where the code is not the nearest, it is the neighbour across a midpoint that is as near as that.

    The neighbour is farther away by twice the distance to the midpoint.
    """
    values = dynamic_map(signed=signed).double()
    chosen, best = values[codes.long()], values[nearest.long()]
    assert ((codes - nearest).abs() <= 1).all()
    excess = (y.double() - chosen).abs() - (y.double() - best).abs()
    assert (excess <= 2 * NEAR_MIDPOINT * (chosen - best).abs()).all()


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic8_lines_are_halfway_at_every_midpoint(signed: bool) -> None:
    """But for rounding: of the map's values, of slopes and offsets, and of the fma, whose result is below 256."""
    values = dynamic_map(signed=signed)
    magnitudes = values[values >= 0].double()
    midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
    line, between = lines(signed=signed), edges(signed=signed)
    part = torch.bucketize(between, line.starts)
    exact = line.slopes[part].double() * midpoints + line.offsets[part].double()
    within = ~torch.isin(between, line.starts)
    assert within.sum() == len(between) - 8
    half_ulp = 2.0**-17
    off = (exact - torch.arange(len(between)) - 0.5).abs()
    assert (off + half_ulp <= NEAR_MIDPOINT)[within].all()


def test_an_edge_is_the_last_float_of_its_code() -> None:
    for signed, count in ((True, 128), (False, 255)):
        magnitudes = dynamic_map(signed=signed)[127 if signed else 0 :].double()
        midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
        found = edges(signed=signed)
        assert found.shape == (count,)
        assert (found.double() <= midpoints).all()
        assert (torch.nextafter(found, torch.tensor(2.0)).double() > midpoints).all()


@lru_cache
def near_steps_of_dynamic8(*, signed: bool) -> tuple[Tensor, Tensor]:
    """All floats in (0, 1] within 64 of an edge, of the start of a decade and of a power of two, and their codes.

    Between two of these steps the code is the same all along, as lines only rise: it is right if it is so at both.

    Returns:
        Two tensors of shape ``(steps, 129)``, those of the edges first.
    """
    starts = torch.tensor([*(10.0**-d for d in range(9)), *(2.0**-e for e in range(1, 41))])
    steps = torch.cat([edges(signed=signed), starts])
    y = float_from_bits(bits(steps)[:, None] + torch.arange(-64, 65, dtype=torch.int32)).clamp(max=1)
    return y, dynamic8_by_the_formula(y, signed=signed)


@pytest.mark.parametrize(("signed", "sign"), [(True, 1), (True, -1), (False, 1)])
def test_dynamic8_near_every_step(signed: bool, sign: int) -> None:
    y = sign * near_steps_of_dynamic8(signed=signed)[0]
    codes = dynamic8_by_the_formula(y, signed=signed)
    assert torch.equal(get_codec("dynamic8").encode(y, torch.ones(1), signed=signed).int(), codes)
    assert (sign * codes.diff() >= 0).all()
    nearest = nearest_in_dynamic_map(y.flatten(), signed=signed).view_as(y)
    assert_nearest_in_dynamic_map(y, codes, nearest, signed=signed)
    if sign > 0:
        parts = torch.isin(edges(signed=signed), lines(signed=signed).starts).nonzero()[:, 0]
        assert torch.equal(codes[parts], nearest[parts])


# The kernels' codes, from steps whose new moments are known.


def in_units_of_one(x: Tensor) -> Tensor:
    """Rows of 256 numbers of which the first is 1, then 255 of ``x``, which is filled up with zeros."""
    rows = -(-len(x) // 255)
    return torch.cat([torch.ones(rows, 1), torch.nn.functional.pad(x, (0, rows * 255 - len(x))).view(rows, 255)], 1)


def dynamic8_kernel_codes(x: Tensor) -> Tensor:
    """Of a first moment, in units of 1."""
    codes = stepped(in_units_of_one(x.flatten()), "momentum", "dynamic8")["momentum_buffer_codes"]
    return codes[:, 1:].flatten()[: x.numel()].int().view_as(x)


def dynamic8_kernel_codes_of_second_moments(v: Tensor) -> Tensor:
    """Of exactly these numbers, which need not be squares; a row must lie within a few hundred floats.

    The old second moment is a little less than they are, so that the gradient's square need only be near the rest.
    """
    beta2, rest = 0.75, 0.25
    rows, count = v.shape
    param = torch.nn.Parameter(torch.zeros(rows, 256))
    hyper = {"betas": (0.0, beta2), "weight_decay": 0.0}
    optimizer = RULES["adam"].make([param], **hyper, codec="dynamic8", block_size=256, min_quantized_numel=0)
    with_gradient(param, torch.zeros(rows, 256))
    optimizer.step()
    old = (v[:, :1] * (1 - 2.0**-9) / beta2).expand_as(v)
    gradient = torch.zeros(rows, 256)
    gradient[:, 0] = 2  # 0.25 * 2 * 2 is 1, the scale
    gradient[:, 1 : count + 1] = ((v.double() - beta2 * old.double()) / rest).sqrt().float()
    g = gradient[:, 1 : count + 1]
    assert torch.equal(fma(float32(beta2), old, rest * g * g), v)
    state = optimizer.state[param]
    state["exp_avg_sq_codes"][:, 1:] = 255
    state["exp_avg_sq_scales"].copy_(old[:, :1])
    with_gradient(param, gradient)
    optimizer.step()
    assert (state["exp_avg_sq_scales"] == 1).all()
    return state["exp_avg_sq_codes"][:, 1 : count + 1].int()


@pytest.mark.parametrize("target", _C.cpu_targets())
def test_dynamic8_kernels_near_every_step(target: str) -> None:
    with use_cpu_target(target):
        y, codes = near_steps_of_dynamic8(signed=True)
        assert torch.equal(dynamic8_kernel_codes(y), codes)
        mirrored = torch.where(codes == 255, 0, 254 - codes)  # there is a 1 but no -1
        assert torch.equal(dynamic8_kernel_codes(-y), mirrored)
        y, codes = near_steps_of_dynamic8(signed=False)
        assert torch.equal(dynamic8_kernel_codes_of_second_moments(y), codes)
