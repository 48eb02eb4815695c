"""Sizes of quantized AdamW's updates over float32's, along a `long` run in float32.

    python benchmarks/quality/updates.py [--steps N] [--results FOLDER] [--cache FOLDER]

Optimizers step copies of the run's weights by the run's gradients, and keep their own state from step to step. Weights
are those of the run again before each step: updates differ by the state alone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

if not __package__:
    import sys

    _BENCHMARKS = Path(__file__).resolve().parents[1]
    sys.path[0:1] = [str(_BENCHMARKS), str(_BENCHMARKS.parent / "launch")]

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quality import records
from quality.choices import LONG, choice_of
from quality.run import RESULTS, problem_of
from quality.task import lr_factor, task_of
from quality.training import gradients

#: Without log4, whose updates are right in the mean but noisy, and so larger.
NAMES = ("log8", "companded8", "dynamic8", "bf16")
EVERY = 250


def movement(optimizer: Optimizer, params: list[Tensor], before: Mapping[Tensor, Tensor], least_numel: int) -> float:
    """Takes a step from the weights `before`; the sum of |update| over the parameters that all optimizers quantize."""
    optimizer.step()
    return sum(float((p - before[p]).abs().sum(dtype=torch.float64)) for p in params if p.numel() >= least_numel)


@torch.no_grad()
def measure(steps: int, cache: Path) -> list[records.Record]:
    """Lines with "ratios": of each `EVERY` "steps" up to that one, the mean of |update| over float32's."""
    torch.set_num_threads(1)
    task = task_of(LONG, "small")
    problem = problem_of(task, cache)
    torch.manual_seed(0)
    model = problem.model(0)
    params = [p for p in model.parameters() if p.requires_grad]
    copies = {name: nn.ParameterList([nn.Parameter(p.detach().clone()) for p in params]) for name in NAMES}
    models: dict[str, nn.Module] = {**copies, "fp32": model}  # float32 last: its step changes the run's weights
    optimizers = {name: choice_of(name).make(x, task, task.lr, choice_of(name).options) for name, x in models.items()}
    sums = dict.fromkeys(models, 0.0)
    ratios: dict[str, list[float]] = {name: [] for name in NAMES}
    for step in range(1, steps + 1):
        with torch.enable_grad():
            gradients(task, problem, model, 0, step)
        nn.utils.clip_grad_norm_(params, task.clip or float("inf"))
        before = [p.detach().clone() for p in params]
        for name, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = task.lr * lr_factor(step, task.steps)
            stepped = params if name == "fp32" else list(copies[name])
            for p, q, weight in zip(params, stepped, before, strict=True):
                q.copy_(weight)
                q.grad = p.grad
            sums[name] += movement(optimizer, stepped, dict(zip(stepped, before, strict=True)), task.quantize_from)
        model.zero_grad()
        if step % EVERY == 0:
            for name in NAMES:
                ratios[name].append(round(sums[name] / sums["fp32"], 5))
            sums = dict.fromkeys(models, 0.0)
            print(f"step {step}: {', '.join(f'{name} {found[-1]}' for name, found in ratios.items())}", flush=True)
    marks = list(range(EVERY, steps + 1, EVERY))
    return [
        {"optimizer": name, "options": choice_of(name).options, "steps": marks, "ratios": found}
        for name, found in ratios.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "shardopt-quality"))
    given = parser.parse_args()
    path = given.results / "updates.jsonl"
    path.unlink(missing_ok=True)
    for line in measure(given.steps, given.cache):
        records.append(path, line)


if __name__ == "__main__":
    main()
