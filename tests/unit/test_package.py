"""Factors, models and learning rates of the package unit-scaling, where it is installed.

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

import shardopt
from shardopt import unit

uu = pytest.importorskip("unit_scaling", reason="unit-scaling is not installed: pip install unit-scaling")
U = pytest.importorskip("unit_scaling.functional")
core = pytest.importorskip("unit_scaling.core.functional")

BOUND = 2.0**-40


def _tokens(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of logits or weights alone, with tokens that are always the same."""
    name = function.__name__
    if name == "embedding":
        return lambda weight: function(torch.arange(24) % 8, weight)
    return lambda logits, **named: function(logits, torch.arange(8), **named)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return U.layer_norm(x, (24,), weight, bias)


def _residual(x: Tensor) -> Tensor:
    return unit.residual_add(unit.residual_split(x, 0.7)[0].sin(), unit.residual_split(x, 0.7)[1], 0.7)


ROWS, QKV = [(8, 24)], [(2, 3, 16, 8)] * 3
LINEAR = [(3, 8, 24), (40, 24), (40,)]
MULTS = (1.0, 0.5, 3.0)
#: Ours, theirs, the shapes of inputs, and options by our names.
OPERATIONS: list[tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]], dict[str, Any]]] = [
    *((unit.linear, U.linear, LINEAR, {"constrained": is_so}) for is_so in (True, False)),
    (unit.readout, U.linear_readout, LINEAR, {}),
    *((unit.matmul, U.matmul, [(8, 24), (24, 5)], {"constrained": is_so}) for is_so in (True, False)),
    (unit.matmul, U.matmul, [(2, 8, 24), (2, 24, 5)], {}),
    (unit.layer_norm, _layer_norm, [(8, 24), (24,), (24,)], {}),
    (_tokens(unit.embedding), _tokens(U.embedding), [(16, 8)], {}),
    *((unit.add, U.add, [(8, 24), (24,)], {"constrained": is_so}) for is_so in (True, False)),
    (unit.mse_loss, U.mse_loss, ROWS * 2, {}),
    (_residual, lambda x: U.residual_apply(torch.sin, x, 0.7), ROWS, {}),
    *(
        (ours, theirs, ROWS, {**more, "mult": mult, "constrained": is_so})
        for ours, theirs, more in (
            (unit.gelu, U.gelu, {}),
            (unit.silu, U.silu, {}),
            (unit.softmax, U.softmax, {"dim": 1}),
        )
        for mult in MULTS
        for is_so in (True, False)
    ),
    *((unit.swiglu, U.silu_glu, ROWS * 2, {"mult": mult}) for mult in MULTS),
    *((_tokens(unit.cross_entropy), _tokens(U.cross_entropy), ROWS, {"mult": mult}) for mult in MULTS),
    *(
        (unit.attention, U.scaled_dot_product_attention, QKV, {"mult": mult, "causal": causal})
        for mult in MULTS
        for causal in (False, True)
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


def test_dropout() -> None:
    x = torch.ones(64, dtype=torch.float64, requires_grad=True)
    results = []
    for of in (unit.dropout, U.dropout):
        torch.manual_seed(0)
        y = of(x, 0.25)
        results.append((y.detach(), torch.autograd.grad(y.sum(), x)[0]))
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected)


@pytest.mark.parametrize(("mult", "ratio"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.3)])
def test_residual_weights(mult: float, ratio: float) -> None:
    rule = core.transformer_residual_scaling_rule(mult, ratio)
    expected = [rule(index, 10) for index in range(10)]
    actual = unit.residual_weights(10, mult, ratio)
    assert all(math.isclose(a, b, rel_tol=BOUND) for a, b in zip(actual, expected, strict=True))


def decoder(layers: int = 4, dim: int = 128) -> torch.nn.Module:
    return uu.TransformerDecoder(hidden_size=dim, vocab_size=256, layers=layers, heads=4)


def test_learning_rates() -> None:
    """Learning rates for a width of 128, 4 layers and a rate of 2^-4."""
    model = decoder()
    groups = shardopt.param_groups(model, rule="u-mup", lr=2.0**-4, weight_decay=2e-4)
    theirs = uu.optim.scaled_parameters(model.parameters(), uu.optim.lr_scale_func_adam, lr=2.0**-4, weight_decay=2e-4)
    assert len(theirs) == 22
    assert len(groups) == 4
    assert sorted(round(group["lr"], 6) for group in groups) == [0.001381, 0.002762, 0.005524, 0.0625]
    ours = {param: group for group in groups for param in group["params"]}
    for group in theirs:
        (param,) = group["params"]
        for option in ("lr", "weight_decay"):
            assert math.isclose(ours[param][option], group[option], rel_tol=BOUND)
