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
FACTORS = [name for name, f in vars(multipliers).items() if callable(f) and f.__module__ == multipliers.__name__]


def draw_powers(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Replaces all factors by powers of two between 1/8 and 8."""
    generator = random.Random(seed)
    drawn: dict[float, float] = {}

    def power(value: float) -> float:
        return drawn.setdefault(value, 2.0 ** generator.randint(-3, 3))

    def wrapped(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found = f(*args, **options)
            return tuple(map(power, found)) if isinstance(found, tuple) else power(found)

        return call

    for name in FACTORS:
        if not name.startswith("_") and name != "residual_weights":  # these are hyper-parameters
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
    return F.linear(x, layer.weight) * multipliers.linear(inside, out, 1)[0]


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
        of_attention, of_mlp = (multipliers.residual(tau) for tau in block.weights)
        branch = plain_norm(x.view_as(x))
        x = plain_attention(branch, block.attention, turn) * of_attention[0] + x * of_attention[1]
        branch = plain_norm(x.view_as(x))
        x = plain_swiglu(branch, block.mlp) * of_mlp[0] + x * of_mlp[1]
    out, inside = model.head.weight.shape
    return F.linear(plain_norm(x), model.head.weight) * multipliers.readout(inside, out, 1)[0]


def gradients(model: nn.Module, forward: Callable[[Tensor], Tensor], batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = F.cross_entropy(forward(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    found = torch.autograd.grad(loss, list(model.parameters()))
    return loss, dict(zip((name for name, _ in model.named_parameters()), found, strict=True))


def transformer() -> tuple[UnitTransformer, Tensor]:
    model = build(ModelConfig(dim=32, layers=2, heads=2), CONTEXT, torch.float64)
    return model, torch.randint(256, (WINDOWS, CONTEXT + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("seed", range(2))
def test_transformer(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw_powers(monkeypatch, seed)
    model, batch = transformer()
    loss, actual = gradients(model, model, batch)
    plain_loss, expected = gradients(model, lambda tokens: plain_logits(model, tokens), batch)
    assert torch.equal(loss, plain_loss)
    assert {name: power_between(actual[name], expected[name]) for name in expected}.keys() == actual.keys()


def test_a_gradient_in_another_direction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients through one of two matrices are scaled otherwise than through the other and past both."""
    draw_powers(monkeypatch, 1)  # in which the two factors have different powers
    model, batch = transformer()
    model.blocks[1].mlp.gate.constrained = True
    _, actual = gradients(model, model, batch)
    _, expected = gradients(model, lambda tokens: plain_logits(model, tokens), batch)
    assert power_between(actual["head.weight"], expected["head.weight"])
    with pytest.raises(AssertionError):
        power_between(actual["blocks.0.mlp.up.weight"], expected["blocks.0.mlp.up.weight"])


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight) + bias  # in two roundings, as in shardopt.unit


def dropped(x: Tensor, p: float) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(x, p)


def unit_dropped(x: Tensor, p: float) -> Tensor:
    torch.manual_seed(0)
    return unit.dropout(x, p)


#: What is not in the transformer: unit-scaled, plain, the shapes of its inputs, and how many of them are no parameters.
OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]], int]] = {
    "linear": (unit.linear, affine, [(3, 8, 24), (40, 24), (40,)], 1),
    "matmul": (unit.matmul, torch.matmul, [(2, 8, 24), (2, 24, 5)], 2),
    "gelu": (lambda x: unit.gelu(x, 0.5), lambda x: F.gelu(x * 0.5) / 0.5, [(8, 24)], 1),
    "silu": (lambda x: unit.silu(x, 2.0), lambda x: x * torch.sigmoid(x * 2.0), [(8, 24)], 1),
    "softmax": (lambda x: unit.softmax(x, 1, 2.0), lambda x: F.softmax(x * 2.0, 1), [(8, 24)], 1),
    "attention": (
        lambda *qkv: unit.attention(*qkv, causal=False, mult=2.0),
        lambda *qkv: F.scaled_dot_product_attention(*qkv, scale=0.25),
        [(2, 3, 16, 8)] * 3,
        3,
    ),
    "layer_norm": (
        lambda x, weight, bias: unit.layer_norm(x, weight, bias),
        lambda x, weight, bias: F.layer_norm(x, (24,), weight, bias),
        [(8, 24), (24,), (24,)],
        1,
    ),
    "rms_norm": (unit.rms_norm, lambda x, weight: plain_norm(x) * weight, [(8, 24), (24,)], 1),
    "add": (unit.add, torch.add, [(8, 24), (24,)], 2),
    "dropout": (lambda x: unit_dropped(x, 0.5), lambda x: dropped(x, 0.5), [(8, 24)], 1),
    "mse_loss": (unit.mse_loss, lambda x, y: F.mse_loss(x, y, reduction="sum") / 256, [(8, 32), (8, 32)], 2),
    "cross_entropy": (
        lambda x: unit.cross_entropy(x, torch.arange(8), 2.0),
        lambda x: F.cross_entropy(x * 2.0, torch.arange(8), reduction="sum") / 8,
        [(8, 24)],
        1,
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The output has a factor, the gradients of all inputs have one, and each parameter has its own."""
    draw_powers(monkeypatch, 5)
    scaled, plain, shapes, inputs = OPERATIONS[name]
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]
    actual, expected = scaled(*leaves), plain(*leaves)
    power_between(actual, expected)
    upstream = torch.randn(actual.shape, dtype=torch.float64, generator=generator)
    pairs = zip(
        torch.autograd.grad(actual, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    )
    ratios = [power_between(*pair) for pair in pairs]
    assert len({*ratios[:inputs]}) <= 1
