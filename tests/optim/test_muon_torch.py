"""``codec="fp32"`` against torch.optim.Muon: the state and the directions have its bits, weights differ by rounding."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import Shape
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.kernels.newton_schulz import NewtonSchulz

muon = pytest.importorskip("torch.optim._muon", reason="this version of PyTorch has no Muon")

#: Wide, tall, square, one row, one column: all multiples of 64 elements, so that PyTorch has no scalar remainder, in
#: which it rounds a product before it adds.
SHAPES: tuple[Shape, ...] = ((32, 66), (96, 30), (40, 40), (1, 256), (192, 1))
STEPS = 4
DEFAULTS = {"lr": 0.02, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def fused_multiply_add() -> None:
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("PyTorch rounds twice in lerp on this CPU")


def start() -> list[Parameter]:
    return [Parameter(values(shape, i)) for i, shape in enumerate(SHAPES)]


def give_gradients(params: list[Parameter], step: int) -> None:
    for index, param in enumerate(params):
        param.grad = values(tuple(param.shape), 100 * (step + 1) + index, param.dtype)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False},
    {"momentum": 0.7, "weight_decay": 0.0},
    {"adjust_lr_fn": "original", "lr": 1e-3},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"ns_steps": 1},
    {"ns_steps": 7, "eps": 1e-3},
    {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 12},
    {"lr": torch.tensor(0.02)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_as_torch(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """The momentum and the direction are computed by the same operations, as long as ``momentum >= 0.5``: torch.lerp
    begins at its other end with a weight of 0.5 or more. Weights are rounded at other places.

    Per step torch rounds ``1 - lr * weight_decay``, the product with the weight and the sum; we round twice; and the
    learning rate times its factor may differ by a unit in the last place. All of that is at most 2^-22 of the old and
    new weight together, since the step is no longer than both. Directions that differed would show: they are bfloat16.
    """
    # By the products that torch computes: on the CPU ours are computed in float32 and rounded.
    monkeypatch.setattr(NewtonSchulz, "__call__", partialmethod(NewtonSchulz.__call__, in_float32=False))
    ours, theirs = start(), start()
    given = {**DEFAULTS, **options}
    optimizer, torchs = shardopt.Muon(ours, codec="fp32", **given), torch.optim.Muon(theirs, **given)
    bounds = [torch.zeros_like(param) for param in theirs]
    for step in range(STEPS):
        before = [param.detach().clone() for param in theirs]
        for params, each in ((ours, optimizer), (theirs, torchs)):
            give_gradients(params, step)
            each.step()
        assert_same(buffers(optimizer), buffers(torchs))
        for one, other, bound, old in zip(ours, theirs, bounds, before, strict=True):
            bound += 2.0**-22 * (old.abs() + other.detach().abs())
            assert bool(((one - other).abs() <= bound).all())


def buffers(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    params = optimizer.param_groups[0]["params"]
    return {str(index): optimizer.state[param]["momentum_buffer"] for index, param in enumerate(params)}
