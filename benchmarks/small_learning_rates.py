"""Fine-tunes a trained model with a learning rate of 1e-6, as reinforcement learning does, in float32 and in bfloat16.

    python benchmarks/small_learning_rates.py [--lr X] [--steps N] [--seeds N] [--json]

The byte-level model of the quality study's task ``finetune`` (0.46 million parameters, trained on Python's standard
library for 1,500 steps) goes on with C++ headers. Every run starts at the same weights, rounded to bfloat16, and a seed
has the same batches in all runs. AdamW with state in 8 bits steps weights in float32 (with masters: float32 copies of
bfloat16 weights), and in bfloat16 with the options of docs/options.md for such weights. Each run is compared with
torch.optim.AdamW on float32 weights:

    changed     weights, as the model has them, that differ from the start
    distance    |run - float32| / |float32 - start|, norms over all weights; masters where there are some, else weights
    progress    the movement's component along float32's, over the length of float32's
    model's     the same for weights as the model has them, after rounding
    loss        by which the held-out loss fell
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[1:1] = [str(Path(__file__).resolve().parents[1] / "launch")]

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import results
import shardopt
from quality.task import BETAS, EPS, Problem, task_of
from results import Cell, Column

EXACT = "float32, torch.optim.AdamW"
#: Name in the table: type of the weights, and the optimizer's options.
WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bf16, master_weight_bits=32": (torch.bfloat16, {"master_weight_bits": 32}),
    "bf16, master_weight_bits=24": (torch.bfloat16, {"master_weight_bits": 24}),
    "bf16, stochastic_rounding": (torch.bfloat16, {"stochastic_rounding": True}),
    "bf16, none": (torch.bfloat16, {}),
}


def flat(weights: dict[nn.Parameter, Tensor] | list[nn.Parameter]) -> Tensor:
    """All weights in one: float64, (parameters,)."""
    tensors = weights.values() if isinstance(weights, dict) else weights
    return torch.cat([weight.detach().double().flatten() for weight in tensors])


class Run:
    """A fine-tuned model.

    Attributes:
        weights: as the model has them: float64, (parameters,).
        masters: the weights that the optimizer keeps, likewise.
        loss: held out, in nats per byte.
    """

    def __init__(
        self,
        problem: Problem,
        dtype: torch.dtype,
        make: Callable[[list[nn.Parameter]], Optimizer],
        seed: int,
        steps: int,
    ) -> None:
        model = problem.model(seed).to(torch.bfloat16).to(dtype)
        params = list(model.parameters())
        optimizer = make(params)
        for step in range(1, steps + 1):
            problem.loss(model, seed, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.weights = self.masters = flat(params)
        if isinstance(optimizer, shardopt.optim.ShardedOptimizer):
            kept = optimizer.full_precision_parameters()
            self.masters = flat([kept.get(param, param) for param in params])  # type: ignore[misc]
        self.loss = problem.evaluate(model.float())["loss"]


def figures(run: Run, exact: Run, start: Tensor, loss: float) -> list[float]:
    """The figures of a run, in the order of the columns."""
    movement = exact.weights - start
    length = movement.norm()

    def distance(weights: Tensor) -> float:
        return float((weights - exact.weights).norm() / length)

    def progress(weights: Tensor) -> float:
        return float((weights - start) @ movement / length**2)

    return [
        100 * float((run.weights != start).double().mean()),
        distance(run.masters),
        progress(run.masters),
        distance(run.weights),
        progress(run.weights),
        1000 * (loss - run.loss),
    ]


def rows(lr: float, steps: int, seeds: int, folder: Path) -> Iterator[list[Cell]]:
    task = task_of("finetune", "small")
    problem = task.load(task.settings, folder)
    options = {"lr": lr, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
    model = problem.model(0).to(torch.bfloat16).float()
    start, loss = flat(list(model.parameters())), problem.evaluate(model)["loss"]
    exact = [
        Run(problem, torch.float32, lambda params: torch.optim.AdamW(params, **options), seed, steps)
        for seed in range(seeds)
    ]
    yield [EXACT, *summary([figures(run, run, start, loss) for run in exact])]
    for name, (dtype, chosen) in WAYS.items():

        def make(params: list[nn.Parameter], chosen: dict[str, Any] = chosen) -> Optimizer:
            return shardopt.AdamW8bit(params, **options, **chosen)

        runs = [Run(problem, dtype, make, seed, steps) for seed in range(seeds)]
        yield [name, *summary([figures(run, other, start, loss) for run, other in zip(runs, exact, strict=True)])]


def summary(figures_of: list[list[float]]) -> list[Cell]:
    """Means over the seeds, and the standard error of the last figure's."""
    columns = list(zip(*figures_of, strict=True))
    last = columns[-1]
    error = statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else None
    return [*map(statistics.mean, columns), error]


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    columns = [
        Column("weights"),
        Column("changed", "%", 1),
        Column("distance", digits=3),
        Column("progress", digits=3),
        Column("model's distance", digits=3),
        Column("model's progress", digits=3),
        Column("loss fell by", "1e-3 nats", 2),
        Column("standard error", "1e-3 nats", 2),
    ]
    with tempfile.TemporaryDirectory() as folder:
        results.report(
            args.json,
            "small_learning_rates",
            f"AdamW8bit with a learning rate of {args.lr:g}, by the precision of weights",
            columns,
            rows(args.lr, args.steps, args.seeds, Path(folder)),
            threads=torch.get_num_threads(),
            notes=[
                f"Means of {args.seeds} runs of {args.steps} steps, no weight decay, constant learning rate; 0.46 "
                "million parameters, 8 windows of 64 bytes a step."
            ],
        )


if __name__ == "__main__":
    main()
