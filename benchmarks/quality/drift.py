"""Drift of free-running optimizers over their steps, on the streams of gradients of benchmarks/free_running.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, nn
from torch.optim import Optimizer

from free_running import COLS, SCENARIOS, STEPS, Run
from quality import records
from quality.choices import CHOICES, Choice
from quality.task import Task

NAMES = ("log8", "log8_repaid", "companded8", "dynamic8", "bf16", "log4", "bnb8", "torchao8", "torchao4", "torchao_fp8")
ROWS = 128
#: Steps between two points of a curve.
EVERY = 10
_LR = 1e-3


def _no_problem(settings: Any, cache: Any) -> Any:
    raise RuntimeError("a stream of gradients has no problem to load")


#: Stands in for a task where an optimizer is made: all tensors are quantized, whatever their size.
STREAM = Task("stream", {}, STEPS, _LR, _no_problem, quantize_from=4096)


def _maker(choice: Choice) -> Callable[..., Optimizer]:
    return lambda params: choice.make(nn.ParameterList(params), STREAM, _LR, choice.options)


def measure(scenario: str, names: list[str], rows: int = ROWS) -> list[records.Record]:
    """Runs optimizers beside torch's AdamW in float32 on a stream; a line each.

    Returns:
        Lines with "mean", the drift after every 10 steps (mean difference over mean movement), and "worst", the largest
        difference at the end over the largest update of float32.
    """
    stream = SCENARIOS[scenario]
    gradients = stream.make(rows, Generator().manual_seed(0))
    start = torch.zeros(rows, COLS)
    exact = Run(_maker(CHOICES["fp32"]), start, stream.scale)
    runs = {name: Run(_maker(CHOICES[name]), start, stream.scale) for name in names}
    means: dict[str, list[float]] = {name: [] for name in names}
    for t in range(1, STEPS + 1):
        gradient = gradients(t) * stream.scale
        for run in (exact, *runs.values()):
            run.step(gradient)
        if t % EVERY == 0:
            for name, run in runs.items():
                means[name].append(run.drift_from(exact).mean)
    return [
        {
            "scenario": scenario,
            "optimizer": name,
            "options": CHOICES[name].options,
            "elements": rows * COLS,
            "mean": [float(f"{mean:.4g}") for mean in means[name]],
            "worst": float(f"{run.drift_from(exact).worst:.4g}"),
            "torch": torch.__version__,
        }
        for name, run in runs.items()
    ]
