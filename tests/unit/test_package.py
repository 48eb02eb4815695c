"""Factors of the package unit-scaling, where it is installed.

Operations of both run in float64. Their factors are at most a dozen floating-point operations, each within 2^-52, and
sums have fewer than 128 terms, so that results differ by less than 2^-40 of their norm unless a factor does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardopt import unit

uu = pytest.importorskip("unit_scaling", reason="unit-scaling is not installed: pip install unit-scaling")
U = pytest.importorskip("unit_scaling.functional")
core = pytest.importorskip("unit_scaling.core.functional")

BOUND = 2.0**-40


def _residual(x: Tensor) -> Tensor:
    return unit.residual_add(unit.residual_split(x, 0.7)[0].sin(), unit.residual_split(x, 0.7)[1], 0.7)


ROWS, QKV, LINEAR = [(8, 24)], [(2, 3, 16, 8)] * 3, [(3, 8, 24), (40, 24), (40,)]
TOKENS = torch.arange(24) % 8
FREE = {"constrained": False}
#: Ours, theirs, the shapes of inputs, and options by our names.
OPERATIONS: list[tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]], dict[str, Any]]] = [
    *((unit.linear, U.linear, LINEAR, options) for options in ({}, FREE)),
    (unit.readout, U.linear_readout, LINEAR, {}),
    *((unit.matmul, U.matmul, [(2, 8, 24), (2, 24, 5)], options) for options in ({}, FREE)),
    (unit.layer_norm, lambda x, *affine: U.layer_norm(x, (24,), *affine), [(8, 24), (24,), (24,)], {}),
    (lambda weight: unit.embedding(TOKENS, weight), lambda weight: U.embedding(TOKENS, weight), [(16, 8)], {}),
    *((unit.add, U.add, [(8, 24), (24,)], options) for options in ({}, FREE)),
    (unit.mse_loss, U.mse_loss, ROWS * 2, {}),
    (_residual, lambda x: U.residual_apply(torch.sin, x, 0.7), ROWS, {}),
    *((unit.gelu, U.gelu, ROWS, {"mult": mult, **options}) for mult, options in ((0.5, {}), (3.0, FREE))),
    *((unit.silu, U.silu, ROWS, {"mult": mult, **options}) for mult, options in ((3.0, {}), (0.5, FREE))),
    *((unit.softmax, U.softmax, ROWS, {"dim": 1, "mult": mult, **FREE}) for mult in (0.5, 3.0)),
    *((unit.swiglu, U.silu_glu, ROWS * 2, {"mult": mult}) for mult in (1.0, 0.5, 3.0)),
    *(
        (
            lambda x, **own: unit.cross_entropy(x, TOKENS[:8], **own),
            lambda x, **own: U.cross_entropy(x, TOKENS[:8], **own),
            ROWS,
            {"mult": mult},
        )
        for mult in (1.0, 3.0)
    ),
    *(
        (unit.attention, U.scaled_dot_product_attention, QKV, {"mult": mult, "causal": causal})
        for mult, causal in ((1.0, True), (0.5, False), (3.0, True))
    ),
]


def theirs_of(options: dict[str, Any]) -> dict[str, Any]:
    """Options by unit-scaling's names."""
    names = {"causal": "is_causal"}
    found = {names.get(name, name): value for name, value in options.items() if name != "constrained"}
    return found if options.get("constrained", True) else {**found, "constraint": None}


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).norm() <= BOUND * expected.norm()


@pytest.mark.parametrize(("ours", "theirs", "shapes", "options"), OPERATIONS)
def test_operation(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    shapes: list[tuple[int, ...]],
    options: dict[str, Any],
) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]
    actual, expected = ours(*leaves, **options), theirs(*leaves, **theirs_of(options))
    assert_near(actual, expected)
    upstream = torch.randn(actual.shape, dtype=torch.float64, generator=generator)
    pairs = zip(
        torch.autograd.grad(actual, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    )
    for pair in pairs:
        assert_near(*pair)


def test_rms_norm() -> None:
    """unit-scaling computes the root in float32, so float32 results are compared with torch's tolerance for it."""
    generator = torch.Generator().manual_seed(0)
    x, weight, upstream = (torch.randn(shape, generator=generator) for shape in ((8, 24), (24,), (8, 24)))
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    actual, expected = unit.rms_norm(*leaves), U.rms_norm(x, (24,), weight)
    pairs = zip(
        torch.autograd.grad(actual, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    )
    torch.testing.assert_close(actual, expected)
    for pair in pairs:
        torch.testing.assert_close(*pair)


@pytest.mark.parametrize(("mult", "ratio"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.3)])
def test_residual_weights(mult: float, ratio: float) -> None:
    rule = core.transformer_residual_scaling_rule(mult, ratio)
    expected = [rule(index, 10) for index in range(10)]
    actual = unit.residual_weights(10, mult, ratio)
    assert all(math.isclose(a, b, rel_tol=BOUND) for a, b in zip(actual, expected, strict=True))
