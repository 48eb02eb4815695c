"""Gradients are autograd's of the same function, up to one constant per parameter.

Factors are replaced by powers of two, drawn at random for each value of a factor: factors that are equal in every bit
get the same power, others get powers of their own. Powers of two pass through sums and roundings without a trace, so
that gradients must be autograd's bit for bit, times a power of two per parameter, if factors on the way back differ
from those on the way forward at most by what all paths to a parameter have in common. No tolerance is needed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model import ModelConfig, rotate
from shardopt import unit
from shardopt.unit import multipliers
from unit_model import UnitTransformer, build

CONTEXT, WINDOWS = 16, 4  # tokens are a power of two, because the mean loss divides by them
FACTORS = [name for name, f in vars(multipliers).items() if getattr(f, "__module__", "") == multipliers.__name__]


def draw_powers(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Replaces all factors by powers of two between 1/8 and 8."""
    generator = random.Random(seed)
    drawn: dict[float, float] = {}

    def power(value: float) -> float:
        return drawn.setdefault(value, 2.0 ** generator.randint(-3, 3))

    def wrapped(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found = f(*args, **options)
            powers = tuple(map(power, found)) if isinstance(found, tuple) else power(found)
            return multipliers.Factors(*powers) if isinstance(found, multipliers.Factors) else powers

        return call

    for name in FACTORS:
        if not name.startswith("_") and name not in ("Factors", "residual_weights"):  # these are hyper-parameters
            monkeypatch.setattr(multipliers, name, wrapped(getattr(multipliers, name)))


def power_between(found: Tensor, expected: Tensor) -> float:
    """The constant between two tensors, which must be a power of two and equal for all elements."""
    at = int(expected.abs().argmax())
    ratio = (found.flatten()[at] / expected.flatten()[at]).item()
    assert math.frexp(ratio)[0] == 0.5, f"{ratio} is no power of two"
    assert torch.equal(found, ratio * expected)
    return ratio


# Plain torch's form of each function, without anything of shardopt.unit but its factors.


def plain_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    out, inside = layer.weight.shape
    return F.linear(x, layer.weight) * multipliers.linear(inside, out, 1).output


def plain_norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def plain_attention(x: Tensor, layer: unit.Attention, turn: Callable[[Tensor], Tensor]) -> Tensor:
    batch, positions, dim = x.shape
    shared = x.view_as(x)  # views have sums of three gradients added in the order of shardopt.unit
    projected = (plain_linear(shared, layer.query), plain_linear(shared, layer.key), plain_linear(x, layer.value))
    query, key, value = (y.view(batch, positions, layer.heads, -1).transpose(1, 2) for y in projected)
    head_dim = dim // layer.heads
    mixed = F.scaled_dot_product_attention(turn(query), turn(key), value, is_causal=True, scale=1 / head_dim)
    mixed = mixed * multipliers.attention(positions, head_dim, True)
    return plain_linear(mixed.transpose(1, 2).reshape(batch, positions, dim), layer.out)


def plain_swiglu(x: Tensor, layer: unit.SwiGLU) -> Tensor:
    inside = plain_linear(x, layer.up) * F.silu(plain_linear(x, layer.gate)) * multipliers.swiglu()
    return plain_linear(inside, layer.down)


def plain_logits(model: UnitTransformer, tokens: Tensor) -> Tensor:
    def turn(x: Tensor) -> Tensor:
        return rotate(x, model.cosines, model.sines)

    x = F.embedding(tokens, model.embedding.weight)
    for block in model.blocks:
        of_attention, of_mlp = (multipliers.branch_and_skip(tau) for tau in block.weights)
        branch = plain_norm(x.view_as(x))
        x = plain_attention(branch, block.attention, turn) * of_attention[0] + x * of_attention[1]
        branch = plain_norm(x.view_as(x))
        x = plain_swiglu(branch, block.mlp) * of_mlp[0] + x * of_mlp[1]
    out, inside = model.head.weight.shape
    return F.linear(plain_norm(x), model.head.weight) * multipliers.readout(inside, out, 1).output


def gradients(model: nn.Module, forward: Callable[[Tensor], Tensor], batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = F.cross_entropy(forward(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    found = torch.autograd.grad(loss, list(model.parameters()))
    return loss, dict(zip((name for name, _ in model.named_parameters()), found, strict=True))


def transformer() -> tuple[UnitTransformer, Tensor]:
    model = build(ModelConfig(dim=32, layers=2, heads=2), CONTEXT, torch.float64)
    return model, torch.randint(256, (WINDOWS, CONTEXT + 1), generator=torch.Generator().manual_seed(1))


def test_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_powers(monkeypatch, 1)
    model, batch = transformer()
    loss, actual = gradients(model, model, batch)
    plain_loss, expected = gradients(model, lambda tokens: plain_logits(model, tokens), batch)
    assert torch.equal(loss, plain_loss)
    assert {name: power_between(actual[name], expected[name]) for name in expected}.keys() == actual.keys()


# Single operations ----------------------------------------------------------------------------------------------------


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight) + bias  # in two roundings, as in shardopt.unit


def seeded(function: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return function(x, 0.36)

    return call


def free(function: Callable[..., Tensor], *more: Any) -> Callable[..., Tensor]:
    return lambda *x: function(*x, *more, constrained=False)


def between(share: float, a: float, b: float) -> float:
    return a ** (1 - share) * b**share


LINEAR, PRODUCT, ROWS, QKV = [(3, 8, 20), (40, 20), (40,)], [(2, 8, 24), (2, 24, 5)], [(8, 24)], [(2, 3, 16, 8)] * 3
NORM = [(8, 24), (24,), (24,)]
GELU, SILU = between(0.5, 2, (2 / (1 - 1 / math.pi)) ** 0.5), between(0.5, 2, 2**0.5)
SILU_2, SOFTMAX = between(16 / 17, 2, (2 / (1 - 1 / math.pi)) ** 0.5), between(0.5, 24, 24**0.5)
ATTENTION, CAUSAL = 1 / between(1 / 9, 16**-0.5, 1), 1 / between(1 / 9, (math.log(16) / 16) ** 0.5, 1)

#: Unit-scaled operation, the plain one, shapes of inputs and parameters, and the factors that docs/unit_scaling.md says
#: the output and the gradients have. A loss is a mean, of which the plain gradients have the number of elements.
OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]], list[float]]] = {
    "linear": (unit.linear, affine, LINEAR, [20**-0.5, 20**-0.5, 24**-0.5, 24**-0.5]),
    "linear, free": (free(unit.linear), affine, LINEAR, [20**-0.5, 40**-0.5, 24**-0.5, 24**-0.5]),
    "readout": (unit.readout, affine, LINEAR, [1 / 20, 40**-0.5, 24**-0.5, 24**-0.5]),
    "matmul": (unit.matmul, torch.matmul, PRODUCT, [24**-0.5] * 3),
    "matmul, free": (free(unit.matmul), torch.matmul, PRODUCT, [24**-0.5, 5**-0.5, 8**-0.5]),
    "gelu": (lambda x: unit.gelu(x, 0.5), lambda x: F.gelu(x * 0.5) / 0.5, ROWS, [GELU, GELU]),
    "gelu, free": (free(unit.gelu, 0.5), lambda x: F.gelu(x * 0.5) / 0.5, ROWS, [GELU, SILU]),
    "silu": (lambda x: unit.silu(x, 2.0), lambda x: x * torch.sigmoid(x * 2.0), ROWS, [SILU_2, SILU_2]),
    "swiglu": (unit.swiglu, lambda x, gate: x * F.silu(gate), ROWS * 2, [SILU] * 3),
    "softmax": (lambda x: unit.softmax(x, 1, 2.0), lambda x: F.softmax(x * 2.0, 1), ROWS, [SOFTMAX, SOFTMAX]),
    "softmax, free": (free(unit.softmax, 1, 2.0), lambda x: F.softmax(x * 2.0, 1), ROWS, [SOFTMAX, 12**0.75]),
    "attention": (
        lambda *qkv: unit.attention(*qkv, causal=False, mult=2.0),
        lambda *qkv: F.scaled_dot_product_attention(*qkv, scale=0.25),
        QKV,
        [ATTENTION] * 4,
    ),
    "causal attention": (
        lambda *qkv: unit.attention(*qkv, causal=True, mult=2.0),
        lambda *qkv: F.scaled_dot_product_attention(*qkv, scale=0.25, is_causal=True),
        QKV,
        [CAUSAL] * 4,
    ),
    "layer_norm": (unit.layer_norm, lambda x, *affine: F.layer_norm(x, (24,), *affine), NORM, [1, 1, 8**-0.5, 8**-0.5]),
    "rms_norm": (unit.rms_norm, lambda x, weight: plain_norm(x) * weight, NORM[:2], [1, 1, 8**-0.5]),
    "embedding": (
        lambda weight: unit.embedding(torch.arange(24) % 8, weight),
        lambda weight: F.embedding(torch.arange(24) % 8, weight),
        [(16, 8)],
        [1, (16 / 24) ** 0.5],
    ),
    "add": (unit.add, torch.add, NORM[:2], [2**-0.5] * 3),
    "add, free": (free(unit.add), torch.add, NORM[:2], [2**-0.5, 1, 8**-0.5]),
    "dropout": (seeded(unit.dropout), seeded(F.dropout), ROWS, [0.8, 0.8]),
    "mse_loss": (unit.mse_loss, F.mse_loss, [(8, 32)] * 2, [1, 256 * 8**-0.5, 256 * 8**-0.5]),
    "cross_entropy": (
        lambda x: unit.cross_entropy(x, torch.arange(8), 2.0),
        lambda x: F.cross_entropy(x * 2.0, torch.arange(8)),
        ROWS,
        [1, 8 * 24 / 23**0.5 / 2],
    ),
}


def ratios(name: str, ratio: Callable[[Tensor, Tensor], float]) -> list[float]:
    """Between the output, the gradients of inputs and of parameters, and those of the plain operation."""
    scaled, plain, shapes, _ = OPERATIONS[name]
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]
    outputs = scaled(*leaves), plain(*leaves)
    upstream = torch.randn(outputs[1].shape, dtype=torch.float64, generator=generator)
    gradients = (torch.autograd.grad(output, leaves, upstream) for output in outputs)
    return [ratio(*outputs), *(ratio(*pair) for pair in zip(*gradients, strict=True))]


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The page's factors, and nothing but factors: with powers of two in their place all elements have the same."""
    found = ratios(name, lambda a, b: float(a.detach().norm() / b.detach().norm()))
    assert found == pytest.approx(OPERATIONS[name][-1], rel=2.0**-40)
    draw_powers(monkeypatch, 5)
    ratios(name, power_between)


@pytest.mark.parametrize(("mult", "ratio"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.3)])
def test_residual_weights(mult: float, ratio: float) -> None:
    """Layers of a kind have equal shares in the last sum, as these options say; that of squares is 1."""
    x = torch.eye(7, dtype=torch.float64)  # the embedding, and what each layer adds
    total = x[0]
    for layer, tau in zip(x[1:], unit.residual_weights(6, mult, ratio), strict=True):
        branch, skip = unit.residual_split(total, tau)
        total = unit.residual_add(branch * 0 + layer, skip, tau)
        assert total[: int(layer.argmax()) + 1].square().sum() == pytest.approx(1)
    embedding, attention, mlp = total[0], total[1::2], total[2::2]
    torch.testing.assert_close(attention, ratio * mlp)
    assert torch.allclose(mlp, mlp[0])
    assert total[1:].square().sum() == pytest.approx(2 * (mult * float(embedding)) ** 2)
