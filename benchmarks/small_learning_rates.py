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

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    sys.path[1:1] = [str(Path(__file__).resolve().parents[1] / "launch")]

import torch
from torch import Tensor

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


def flat(weights: Sequence[Tensor]) -> Tensor:
    """All weights in one: float64, (parameters,)."""
    return torch.cat([weight.detach().double().flatten() for weight in weights])


class Run(NamedTuple):
    """A fine-tuned model.

    Attributes:
        weights: as the model has them: float64, (parameters,).
        masters: the weights that the optimizer keeps, likewise.
        loss: held out, in nats per byte, of the weights as the model has them.
    """

    weights: Tensor
    masters: Tensor
    loss: float


@lru_cache
def problem_in(folder: Path) -> Problem:
    """The task's model and data, in this process."""
    task = task_of("finetune", "small")
    return task.load(task.settings, folder)


def run(folder: Path, name: str, lr: float, steps: int, seed: int) -> Run:
    """Fine-tunes a model in one of the ways, on one thread."""
    torch.set_num_threads(1)
    problem, dtype = problem_in(folder), WAYS[name][0] if name in WAYS else torch.float32
    model = problem.model(seed).to(torch.bfloat16).to(dtype)
    params = list(model.parameters())
    options: dict[str, Any] = {"lr": lr, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(params, **options)
    if name in WAYS:
        optimizer = shardopt.AdamW8bit(params, **options, **WAYS[name][1])  # type: ignore[assignment]
    for step in range(1, steps + 1):
        problem.loss(model, seed, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = optimizer.full_precision_parameters() if isinstance(optimizer, shardopt.optim.ShardedOptimizer) else {}
    weights, masters = flat(params), flat([kept.get(param, param) for param in params])
    return Run(weights, masters, problem.evaluate(model.float())["loss"])


def figures(found: Run, exact: Run, start: Tensor, loss: float) -> list[float]:
    """The figures of a run, in the order of the columns."""
    movement = exact.weights - start
    length = movement.norm()

    def distance(weights: Tensor) -> float:
        return float((weights - exact.weights).norm() / length)

    def progress(weights: Tensor) -> float:
        return float((weights - start) @ movement / length**2)

    return [
        100 * float((found.weights != start).double().mean()),
        distance(found.masters),
        progress(found.masters),
        distance(found.weights),
        progress(found.weights),
        1000 * (loss - found.loss),
    ]


def rows(lr: float, steps: int, seeds: int, folder: Path) -> Iterator[list[Cell]]:
    model = problem_in(folder).model(0).to(torch.bfloat16).float()
    start, loss = flat(list(model.parameters())), problem_in(folder).evaluate(model)["loss"]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as processes:
        runs = {
            name: [processes.submit(run, folder, name, lr, steps, seed) for seed in range(seeds)]
            for name in (EXACT, *WAYS)
        }
        exact = [each.result() for each in runs[EXACT]]
        for name, of_seeds in runs.items():
            pairs = zip(of_seeds, exact, strict=True)
            yield [name, *summary([figures(each.result(), other, start, loss) for each, other in pairs])]


def summary(figures_of: list[list[float]]) -> list[Cell]:
    """Means over the seeds, and the standard error of the last figure's."""
    columns = list(zip(*figures_of, strict=True))
    last = columns[-1]
    error = statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else None
    return [*map(statistics.mean, columns), error]


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=300)
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
            threads=1,
            notes=[
                f"Means of {args.seeds} runs of {args.steps} steps, no weight decay, constant learning rate; 0.46 "
                "million parameters, 8 windows of 64 bytes a step."
            ],
        )


if __name__ == "__main__":
    main()
