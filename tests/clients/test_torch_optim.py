"""Checks that torch's own tests make of every optimizer, and its averages of weights, for every rule.

Checks of test/test_optim.py whose code is common to all rules stand in tests/optim, tests/state and tests/step.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer, swa_utils

import shardopt
from helpers import CASES, everything
from ranks.snapshot import assert_same


def problem(rule: str) -> tuple[list[Parameter], Optimizer, Callable[[], Tensor]]:
    """A matrix, which is quantized, and a bias; the optimizer; a loss of theirs."""
    generator = torch.Generator().manual_seed(0)
    weight = Parameter(torch.randn(64, 64, generator=generator))
    bias, inputs = Parameter(torch.randn(64, generator=generator)), torch.randn(64, generator=generator)
    optimizer = CASES[rule].make([weight, bias], codec="log8", min_quantized_numel=64)
    return [weight, bias], optimizer, lambda: (weight @ inputs + bias).square().mean()


def run(optimizer: Optimizer, loss_of: Callable[[], Tensor], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("rule", CASES)
def test_save_load_equality(rule: str) -> None:
    """Through a file that unpickles weights only, into an optimizer with another rate; copied and printed as well."""
    params, optimizer, loss_of = problem(rule)
    run(optimizer, loss_of, 3)
    assert repr(optimizer).startswith(type(optimizer).__name__)
    assert all(f"{name}:" in repr(optimizer) for name in optimizer.param_groups[0] if name != "params")
    assert_same(everything(copy.deepcopy(optimizer)), everything(optimizer))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others, other, other_loss = problem(rule)
    with torch.no_grad():
        for param, value in zip(others, params, strict=True):
            param.copy_(value)
    for group in other.param_groups:
        group["lr"] = 123.0
    other.load_state_dict(torch.load(file, weights_only=True))
    run(optimizer, loss_of, 3)
    run(other, other_loss, 3)
    assert_same(everything(other), everything(optimizer))


def test_averaged_models() -> None:
    """torch's averages of the weights see each step, and an optimizer of the averages' copies is its own."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=64)
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    inputs = torch.randn(8, 64)
    means: list[Tensor] = []
    for _ in range(4):
        run(optimizer, lambda: (model(inputs) - inputs).square().mean(), 1)
        averaged.update_parameters(model)
        values = [param.detach().clone() for param in model.parameters()]
        means = [mean.lerp(value, 1 - 0.9) for mean, value in zip(means, values, strict=True)] if means else values
    assert all(map(torch.equal, averaged.module.parameters(), means))
    tuned = shardopt.AdamW8bit(averaged.parameters(), lr=1e-2, min_quantized_numel=64)
    before = everything(optimizer)
    losses = run(tuned, lambda: (averaged(inputs) - inputs).square().mean(), 4)
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert_same(everything(optimizer), before)
