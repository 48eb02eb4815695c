"""Levels of the second moment over 20,000 steps on streams of random gradients, by codec.

A step of ``betas[1] = 0.999`` lowers a second moment by 0.1% where no gradient comes, and raises it where a large one
does. A codec that rounds to nearest and whose values are further apart keeps some of these steps and loses others: its
level moves away from float32's, by more the more steps there are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from quality import records
from quality.choices import choice_of
from quality.moments import drift, moments_of
from quality.task import BETAS, Problem, Task

NAMES = ("log8", "companded8", "dynamic8", "bf16", "log4", "bnb8")
STEPS = 20_000
#: Steps after which the levels are taken.
MARKS = (250, 1000, 2000, 5000, 10_000, 20_000)
#: Decay rates of the second moment, `betas[1]`.
BETAS2 = (0.999, 0.99, 0.95)
ROWS, COLS = 64, 128
_LR = 1e-3
_TENFOLD = 5000

#: (step, source of random numbers) -> gradients, float32 (ROWS, COLS).
Stream = Callable[[int, Generator], Tensor]


def normal(step: int, generator: Generator) -> Tensor:
    """Every element standard normal."""
    return torch.randn(ROWS, COLS, generator=generator)


def heavy_tailed(step: int, generator: Generator) -> Tensor:
    """Student's t with three degrees of freedom, whose fourth moment is infinite."""
    squares = torch.randn(3, ROWS, COLS, generator=generator).square().mean(0)
    return normal(step, generator) / squares.sqrt()


def fading(step: int, generator: Generator) -> Tensor:
    """Heavy-tailed; each element at a scale of its own, log-normal with s = 1; scales fall tenfold in 5,000 steps."""
    scales = torch.randn(ROWS, COLS, generator=Generator().manual_seed(1)).exp()
    return heavy_tailed(step, generator) * scales * 0.1 ** (step / _TENFOLD)


STREAMS: dict[str, Stream] = {"normal": normal, "heavy-tailed": heavy_tailed, "heavy-tailed, fading": fading}


def _no_problem(settings: object, cache: object) -> Problem:
    raise RuntimeError("a stream of gradients has no problem to load")


_TASK = Task("stream", {}, STEPS, _LR, _no_problem)


def measure(stream: str, beta2: float, names: list[str], steps: int = STEPS) -> list[records.Record]:
    """Runs optimizers beside torch's AdamW in float32 on a stream, all with this decay rate; a line each.

    Returns:
        Lines with "levels": after each of "steps", the norm of the root of the second moment over float32's.
    """
    models = {name: nn.ParameterList([nn.Parameter(torch.zeros(ROWS, COLS))]) for name in ("fp32", *names)}
    choices = {name: choice_of(name) for name in models}
    optimizers = {name: it.make(models[name], _TASK, _LR, it.options) for name, it in choices.items()}
    for optimizer in optimizers.values():
        optimizer.param_groups[0]["betas"] = (BETAS[0], beta2)
    generator = Generator().manual_seed(0)
    marks = [step for step in MARKS if step <= steps]
    levels: dict[str, list[float]] = {name: [] for name in names}
    for step in range(1, steps + 1):
        gradient = STREAMS[stream](step, generator)
        for name, model in models.items():
            model[0].grad = gradient.clone()
            optimizers[name].step()
        if step in marks:
            exact = moments_of(optimizers["fp32"])
            for name in names:
                levels[name].append(drift(moments_of(optimizers[name]), exact)["exp_avg_sq_norm"])
    return [
        {
            "stream": stream,
            "beta2": beta2,
            "optimizer": name,
            "options": choices[name].options,
            "elements": ROWS * COLS,
            "steps": marks,
            "levels": levels[name],
            "torch": torch.__version__,
        }
        for name in names
    ]
