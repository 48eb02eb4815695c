"""torch's averages of weights beside our optimizers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import shardopt
from helpers import everything
from ranks.snapshot import assert_same


def run(optimizer: torch.optim.Optimizer, model: nn.Module, inputs: Tensor, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_averaged_models() -> None:
    """The averages see each step, and an optimizer of their copies is its own."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=64)
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    inputs = torch.randn(8, 64)
    means: list[Tensor] = []
    for _ in range(4):
        run(optimizer, model, inputs, 1)
        averaged.update_parameters(model)
        values = [param.detach().clone() for param in model.parameters()]
        means = [mean.lerp(value, 1 - 0.9) for mean, value in zip(means, values, strict=True)] if means else values
    assert all(map(torch.equal, averaged.module.parameters(), means))
    tuned = shardopt.AdamW8bit(averaged.parameters(), lr=1e-2, min_quantized_numel=64)
    before = everything(optimizer)
    losses = run(tuned, averaged, inputs, 4)
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert_same(everything(optimizer), before)
