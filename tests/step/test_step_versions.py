"""Autograd notices a step: a backward pass through values of before it raises, as with torch.optim."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardopt
from step_problem import make, params_of, step

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "torch": torch.optim.AdamW,
    "shardopt": shardopt.AdamW,
    "24-bit masters": lambda params: shardopt.AdamW8bit(params, master_weight_bits=24),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_backward_pass_through_a_graph_of_before_the_step(name: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).bfloat16()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        loss = model(torch.ones(2, 64, dtype=torch.bfloat16)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()


def test_parameters_that_are_not_stepped_keep_their_versions() -> None:
    """Versions stay without a gradient, and of all parameters where a step raises."""
    optimizer = make(nonfinite="raise")
    params = params_of(optimizer)
    for t, without in enumerate([(), (1,), (0, 3), (0, 1, 2, 3, 4), ()]):
        before = [param._version for param in params]
        step(optimizer, t, without)
        changed = {index for index, param in enumerate(params) if param._version != before[index]}
        assert changed == {0, 1, 2, 3, 4} - set(without)
    before = [param._version for param in params]
    params[2].grad[0, 0] = torch.nan
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert [param._version for param in params] == before
