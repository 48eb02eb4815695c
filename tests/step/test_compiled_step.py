"""``torch.compile`` around a step: it is a graph break, and the bits are those of the same loop without it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import shardopt
from helpers import everything
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer

STEPS = 4


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Loop:
    """A model, its optimizer, a schedule of the learning rate, and ways to train them."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 33))
        self.optimizer: ShardedOptimizer = shardopt.AdamW8bit(
            self.model.parameters(), **copy.deepcopy({"lr": 1e-2, **options})
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def gradients(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    def train(self, x: Tensor) -> None:
        self.gradients(x)
        self.optimizer.step()

    def run(self, train: Callable[[Tensor], object]) -> list[dict[str, int]]:
        """Trains; returns dynamo's count of compiled frames after each step."""
        frames = []
        for t in range(STEPS):
            train(values((4, 64), t))
            self.schedule.step()
            frames.append(dict(counters["frames"]))
        return frames


def compiled_step(loop: Loop, backend: str) -> Callable[[Tensor], object]:
    step = torch.compile(loop.optimizer.step, backend=backend)

    def train(x: Tensor) -> None:
        loop.gradients(x)
        step()

    return train


@pytest.mark.parametrize(
    ("way", "backend", "lr", "compiled_autograd"),
    [
        ("step", "eager", 1e-2, False),
        ("train step", "aot_eager", torch.tensor(1e-2), True),
    ],
)
def test_a_compiled_step(way: str, backend: str, lr: Any, compiled_autograd: bool) -> None:
    """Alone, or within a function."""
    compiled, plain = Loop(lr=lr), Loop(lr=lr)
    plain.run(plain.train)
    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
        train = compiled_step(compiled, backend) if way == "step" else torch.compile(compiled.train, backend=backend)
        frames = compiled.run(train)
    assert frames[0], "something is compiled"
    assert frames[2:] == [frames[1]] * (STEPS - 2), "nothing is compiled again, with new learning rates and tables"
    assert_same(everything(compiled.optimizer), everything(plain.optimizer))


def test_released_gradients() -> None:
    """Hooks step parameters during the backward pass of a compiled model."""
    released, plain = Loop(), Loop()
    plain.run(plain.train)
    shardopt.release_gradients(released.model, released.optimizer)
    released.model.compile(backend="aot_eager", fullgraph=True)
    frames = released.run(released.train)
    assert frames[2:] == [frames[1]] * (STEPS - 2)
    assert_same(everything(released.optimizer), everything(plain.optimizer))
