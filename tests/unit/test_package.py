"""Factors, models and learning rates of the package unit-scaling, where it is installed.

Operations of both run in float64. Their factors are at most a dozen floating-point operations, each within 2^-52, and
sums have fewer than 128 terms, so that results differ by less than 2^-40 of their norm unless a factor does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardopt
from shardopt import unit

uu = pytest.importorskip("unit_scaling", reason="unit-scaling is not installed: pip install unit-scaling")
U = pytest.importorskip("unit_scaling.functional")
core = pytest.importorskip("unit_scaling.core.functional")

BOUND = 2.0**-40
Operation = Callable[..., Tensor]

#: Ours, theirs, and the shapes of inputs.
OPERATIONS: dict[str, tuple[Operation, Operation, list[tuple[int, ...]]]] = {
    "linear": (unit.linear, U.linear, [(3, 8, 24), (40, 24), (40,)]),
    "linear, not constrained": (
        lambda x, w: unit.linear(x, w, constrained=False),
        lambda x, w: U.linear(x, w, None, constraint=None),
        [(3, 8, 24), (40, 24)],
    ),
    "readout": (unit.readout, U.linear_readout, [(3, 8, 24), (40, 24), (40,)]),
    "matmul": (unit.matmul, U.matmul, [(2, 8, 24), (2, 24, 5)]),
    "matmul, not constrained": (
        lambda a, b: unit.matmul(a, b, constrained=False),
        lambda a, b: U.matmul(a, b, constraint=None),
        [(8, 24), (24, 5)],
    ),
    "layer_norm": (unit.layer_norm, lambda x, w, b: U.layer_norm(x, (24,), w, b), [(8, 24), (24,), (24,)]),
    "embedding": (
        lambda w: unit.embedding(torch.arange(24) % 8, w),
        lambda w: U.embedding(torch.arange(24) % 8, w),
        [(16, 8)],
    ),
    "add": (unit.add, U.add, [(8, 24), (24,)]),
    "add, not constrained": (
        lambda a, b: unit.add(a, b, constrained=False),
        lambda a, b: U.add(a, b, constraint=None),
        [(8, 24), (24,)],
    ),
    "mse_loss": (unit.mse_loss, U.mse_loss, [(8, 24), (8, 24)]),
    "residual": (
        lambda x: unit.residual_add(unit.residual_split(x, 0.7)[0].sin(), unit.residual_split(x, 0.7)[1], 0.7),
        lambda x: U.residual_apply(torch.sin, x, 0.7),
        [(8, 24)],
    ),
}
for mult in (1.0, 0.5, 3.0):
    OPERATIONS |= {
        f"gelu {mult}": (lambda x, c=mult: unit.gelu(x, c), lambda x, c=mult: U.gelu(x, c), [(8, 24)]),
        f"gelu {mult}, not constrained": (
            lambda x, c=mult: unit.gelu(x, c, constrained=False),
            lambda x, c=mult: U.gelu(x, c, constraint=None),
            [(8, 24)],
        ),
        f"silu {mult}": (lambda x, c=mult: unit.silu(x, c), lambda x, c=mult: U.silu(x, c), [(8, 24)]),
        f"silu {mult}, not constrained": (
            lambda x, c=mult: unit.silu(x, c, constrained=False),
            lambda x, c=mult: U.silu(x, c, constraint=None),
            [(8, 24)],
        ),
        f"swiglu {mult}": (
            lambda x, g, c=mult: unit.swiglu(x, g, c),
            lambda x, g, c=mult: U.silu_glu(x, g, c),
            [(8, 24), (8, 24)],
        ),
        f"softmax {mult}": (
            lambda x, c=mult: unit.softmax(x, 1, c),
            lambda x, c=mult: U.softmax(x, 1, mult=c),
            [(8, 24)],
        ),
        f"softmax {mult}, not constrained": (
            lambda x, c=mult: unit.softmax(x, 1, c, constrained=False),
            lambda x, c=mult: U.softmax(x, 1, constraint=None, mult=c),
            [(8, 24)],
        ),
        f"cross_entropy {mult}": (
            lambda x, c=mult: unit.cross_entropy(x, torch.arange(8), c),
            lambda x, c=mult: U.cross_entropy(x, torch.arange(8), mult=c),
            [(8, 24)],
        ),
    }
    for causal in (False, True):
        OPERATIONS[f"attention {mult}, {causal}"] = (
            lambda *qkv, c=mult, m=causal: unit.attention(*qkv, causal=m, mult=c),
            lambda *qkv, c=mult, m=causal: U.scaled_dot_product_attention(*qkv, is_causal=m, mult=c),
            [(2, 3, 16, 8)] * 3,
        )


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).norm() <= BOUND * expected.norm()


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name: str) -> None:
    ours, theirs, shapes = OPERATIONS[name]
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]
    actual, expected = ours(*leaves), theirs(*leaves)
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


def test_learning_rates_without_the_parameters_attributes() -> None:
    """The modules give the learning rates when parameters were replaced, as ``fully_shard`` does."""
    expected = shardopt.param_groups(decoder(), rule="u-mup", lr=1.0)
    model = decoder()
    for module in model.modules():
        for name, param in module._parameters.items():
            module._parameters[name] = None if param is None else torch.nn.Parameter(param.detach().clone())
    assert not any(hasattr(param, "mup_type") for param in model.parameters())
    assert shardopt.param_groups(model, rule="u-mup", lr=1.0).table() == expected.table()
