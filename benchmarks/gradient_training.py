"""Trains two tasks of the quality study on 2 ranks, with gradients reduced in float32, bfloat16 and 8 bits.

    python benchmarks/gradient_training.py [--tasks NAME ...] [--seeds N] [--steps N] [--json]

Each rank has its own batches, gloo moves the gradients, and AdamW keeps its state in 8 bits (log8) in all runs.
Printed are held-out losses, and differences from bfloat16 seed by seed with their standard error. The difference
between float32 and bfloat16 says how much of it is noise. A run of 100 steps takes half a minute on two cores.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path

if not __package__:
    sys.path[1:1] = [str(Path(__file__).resolve().parents[1] / "launch")]

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import results
import shardopt
from measuring import on_ranks
from quality.task import BETAS, EPS, WEIGHT_DECAY, lr_factor, task_of
from results import Cell, Column

RANKS = 2
BASE = "DDP, bf16"


def bf16_all_reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with classes
    """As torch's bf16_compress_hook, which it has for NCCL alone."""
    half = bucket.buffer().bfloat16().div_(RANKS)
    dist.all_reduce(half)
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer().copy_(half))
    return done


def wrapped(way: str, model: nn.Module) -> nn.Module:
    """The model on all ranks, with gradients reduced in this way."""
    if way == "FSDP2, 8 bits":
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        shardopt.comm.ordered_gradients(model, micro_batches=RANKS, wire="e4m3")
        return model
    replica = DistributedDataParallel(model)
    if way == "DDP, bf16":
        replica.register_comm_hook(None, bf16_all_reduce)
    elif way == "DDP, 8 bits":
        shardopt.comm.ordered_gradients(replica, micro_batches=RANKS, wire="e4m3")
    return replica


WAYS = ("DDP, fp32", BASE, "DDP, 8 bits", "FSDP2, 8 bits")


def train(way: str, name: str, seed: int, steps: int) -> float:
    """Held-out loss of a run, in nats."""
    task = task_of(name, "small")
    problem = task.load(task.settings, Path(tempfile.gettempdir(), "shardopt-quality"))
    model = wrapped(way, problem.model(seed))
    optimizer = shardopt.AdamW8bit(model.parameters(), lr=task.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    own = 1000 * (1 + dist.get_rank()) + seed  # of this rank's batches
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = task.lr * lr_factor(step, steps)
        problem.loss(model, own, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return problem.evaluate(model)["loss"]


def losses(tasks: list[str], seeds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Held-out losses by task and way, one per seed."""
    found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in tasks}
    for name, seed, way in product(tasks, range(seeds), WAYS):
        found[name][way].append(train(way, name, seed, steps))
        if dist.get_rank() == 0:
            print(f"{name}, seed {seed}, {way}: {found[name][way][-1]:.4f}", flush=True)
    return found


def less(found: list[float], base: list[float]) -> str:
    """Mean difference and its standard error."""
    differences = [x - y for x, y in zip(found, base, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return f"{statistics.mean(differences):+.4f} +- {error:.4f}"


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=("bytes", "tokens"), default=["bytes", "tokens"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    by_task = on_ranks(RANKS, losses, arguments.tasks, arguments.seeds, arguments.steps)
    columns = [Column("")]
    for name in by_task:
        columns += [Column(name, "nats", 4), Column(f"{name}, less bf16")]
    rows: list[list[Cell]] = [[way] for way in WAYS]
    for row in rows:
        way = str(row[0])
        for found in by_task.values():
            row += [statistics.mean(found[way]), "" if way == BASE else less(found[way], found[BASE])]
    notes = [
        f"Held-out loss after {arguments.steps} steps on {RANKS} ranks, {arguments.seeds} seeds, AdamW with log8 "
        "state, with standard errors."
    ]
    results.report(arguments.json, "gradient_training", "Gradients in 8 bits", columns, rows, threads=1, notes=notes)


if __name__ == "__main__":
    main()
