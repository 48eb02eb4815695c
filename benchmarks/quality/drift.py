"""Drift of free-running optimizers over 200 steps: how far they get from float32 state on the same gradients.

Gradients are drawn per step, the same for all optimizers; nothing is fed back. ``eps`` is the default times the
gradients' scale, so that it weighs the same at every scale; there is no weight decay, which would only add movement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import Parameter

from quality import records
from quality.choices import CHOICES, Choice
from quality.task import Task

NAMES = ("log8", "log8_repaid", "companded8", "dynamic8", "bf16", "log4", "bnb8", "torchao8", "torchao4", "torchao_fp8")
ROWS, COLS = 128, 512
STEPS = 200
#: Steps between two points of a curve.
EVERY = 10
_LR = 1e-3

#: Step, from 1 -> gradients: float32, (rows, COLS).
Gradients = Callable[[int], Tensor]


class Scenario(NamedTuple):
    """A stream of gradients, made from a number of rows and a source of random numbers, and multiplied by a scale."""

    make: Callable[[int, Generator], Gradients]
    scale: float = 1.0


def iid(rows: int, generator: Generator) -> Gradients:
    """Every element standard normal."""
    return lambda t: torch.randn(rows, COLS, generator=generator)


def log_normal(rows: int, generator: Generator) -> Gradients:
    """Every coordinate at a scale of its own, log-normal with s = 2."""
    scale = torch.exp(2 * torch.randn(rows, COLS, generator=generator))
    return lambda t: scale * torch.randn(rows, COLS, generator=generator)


def half_sparse(rows: int, generator: Generator) -> Gradients:
    """Half of the coordinates, chosen at random, have a gradient in 5% of the steps only."""
    sparse = torch.rand(rows, COLS, generator=generator) < 0.5

    def gradients(t: int) -> Tensor:
        on = torch.rand(rows, COLS, generator=generator) < 0.05
        return torch.randn(rows, COLS, generator=generator) * (on | ~sparse)

    return gradients


def rare_rows(rows: int, generator: Generator) -> Gradients:
    """Every row, as of an embedding, has gradients in 5% of the steps only, and then in all its elements."""

    def gradients(t: int) -> Tensor:
        on = torch.rand(rows, 1, generator=generator) < 0.05
        return torch.randn(rows, COLS, generator=generator) * on

    return gradients


def spike(rows: int, generator: Generator) -> Gradients:
    """In one step, half-way, all gradients are 1e4 times as large."""
    return lambda t: torch.randn(rows, COLS, generator=generator) * (1e4 if t == STEPS // 2 else 1.0)


SCENARIOS = {
    "iid": Scenario(iid),
    "iid at 1e-7": Scenario(iid, 1e-7),
    "iid at 1e5": Scenario(iid, 1e5),
    "log-normal": Scenario(log_normal),
    "half sparse": Scenario(half_sparse),
    "rare rows": Scenario(rare_rows),
    "one step of 1e4": Scenario(spike),
}


def _no_problem(settings: Any, cache: Any) -> Any:
    raise RuntimeError("a stream of gradients has no problem to load")


#: Stands in for a task where an optimizer is made: all tensors are quantized, whatever their size.
STREAM = Task("stream", {}, STEPS, _LR, _no_problem, quantize_from=4096)


class Run:
    """An optimizer and its parameter, which begins at zero."""

    def __init__(self, choice: Choice, rows: int, scale: float) -> None:
        self.param = Parameter(torch.zeros(rows, COLS))
        self.largest_update = 0.0
        self._optimizer = choice.make(nn.ParameterList([self.param]), STREAM, _LR, choice.options)
        (group,) = self._optimizer.param_groups
        group.update({"weight_decay": 0.0} if "weight_decay" in group else {})
        group.update({"eps": group["eps"] * scale} if "eps" in group else {})

    def step(self, gradient: Tensor) -> None:
        before = self.param.detach().clone()
        self.param.grad = gradient
        self._optimizer.step()
        self.largest_update = max(self.largest_update, float((self.param.detach() - before).abs().max()))

    def drift_from(self, exact: Run) -> tuple[float, float]:
        """Mean difference over mean movement, and the largest difference over the largest update, of float32."""
        difference = (self.param.detach() - exact.param.detach()).abs()
        movement = float(exact.param.detach().abs().mean())
        return float(difference.mean()) / movement, float(difference.max()) / exact.largest_update


def measure(scenario: str, names: list[str], rows: int = ROWS) -> list[records.Record]:
    """Runs optimizers beside torch's AdamW in float32 on a stream; a line each.

    Returns:
        Lines with "mean", the drift after every 10 steps (mean difference over mean movement), and "worst", the largest
        difference at the end over the largest update of float32.
    """
    stream = SCENARIOS[scenario]
    gradients = stream.make(rows, Generator().manual_seed(0))
    exact = Run(CHOICES["fp32"], rows, stream.scale)
    runs = {name: Run(CHOICES[name], rows, stream.scale) for name in names}
    means: dict[str, list[float]] = {name: [] for name in names}
    for t in range(1, STEPS + 1):
        gradient = gradients(t) * stream.scale
        for run in (exact, *runs.values()):
            run.step(gradient)
        if t % EVERY == 0:
            for name, run in runs.items():
                means[name].append(run.drift_from(exact)[0])
    return [
        {
            "scenario": scenario,
            "optimizer": name,
            "options": CHOICES[name].options,
            "elements": rows * COLS,
            "mean": [float(f"{mean:.4g}") for mean in means[name]],
            "worst": float(f"{run.drift_from(exact)[1]:.4g}"),
            "torch": torch.__version__,
        }
        for name, run in runs.items()
    ]
