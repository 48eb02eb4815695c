"""Cost of clipping by the norm: shardopt.clip_grad_norm_ beside torch.nn.utils.clip_grad_norm_(foreach=True).

48 million elements, of which time is what memory takes, and 300 DTensors of 16, of which it is what Python takes.
Contenders take turns; the median of the ratios within a round is reported beside the medians. "in place" multiplies the
gradients, as torch does; "by the step" leaves them, which shardopt's optimizers multiply as they read them; "small
norm" is below the limit, so that there is nothing to multiply.

    python benchmarks/clip.py --threads 2 --json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import results
import shardopt
from measuring import in_turn
from results import Cell, Column

Params = list[Tensor]
LIMIT = 1.0
DTENSORS = "300 DTensors of 16"


def large(dtype: torch.dtype) -> Params:
    """48 million elements in 12 matrices."""
    params: Params = [nn.Parameter(torch.zeros(2048, 1953, dtype=dtype)) for _ in range(12)]
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype)
    return params


def small() -> Params:
    """300 DTensors of 16 elements, on a mesh of one rank."""
    mesh = init_device_mesh("cpu", (1,))
    params: Params = []
    for _ in range(300):
        params.append(nn.Parameter(distribute_tensor(torch.zeros(16), mesh, [Shard(0)])))
        params[-1].grad = distribute_tensor(torch.randn(16), mesh, [Shard(0)])
    return params


def refill(params: Params, like: list[Tensor]) -> None:
    """Gives the gradients back what clipping took."""
    for param, gradient in zip(params, like, strict=True):
        assert param.grad is not None
        (param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad).copy_(gradient)


def measure(params: Params, rounds: int) -> dict[str, list[float]]:
    """Seconds by contender, in each round after two that are not counted."""
    optimizer = shardopt.AdamW8bit(params)
    clip = {
        "torch": partial(torch.nn.utils.clip_grad_norm_, params, LIMIT, foreach=True),
        "in place": partial(shardopt.clip_grad_norm_, params, LIMIT),
        "by the step": partial(shardopt.clip_grad_norm_, params, LIMIT, optimizer=optimizer),
        "torch, small norm": partial(torch.nn.utils.clip_grad_norm_, params, 1e9, foreach=True),
        "small norm": partial(shardopt.clip_grad_norm_, params, 1e9),
    }
    gradients = [g.to_local() if isinstance(g, DTensor) else g for g in (p.grad for p in params) if g is not None]
    like = [gradient.clone() for gradient in gradients]
    return in_turn(clip, rounds, before=lambda _: refill(params, like))


def report(args: argparse.Namespace, found: dict[str, dict[str, list[float]]]) -> None:
    """Prints medians and ratios to torch's in the same round, and writes them where ``--json`` says."""
    columns = [Column(""), Column("torch", "ms")]
    names = {"in place": "in place", "by the step": "by the step", "small norm": "norm below the limit"}
    for name in names.values():
        columns += [Column(name, "ms"), Column(f"{name}, to torch", digits=2)]
    rows: list[list[Cell]] = []
    goals = []
    for case, seconds in found.items():
        median = {name: statistics.median(times) for name, times in seconds.items()}
        rows.append([case, median["torch"] * 1e3])
        for name in names:
            beside = seconds["torch, small norm" if name == "small norm" else "torch"]
            ratio = statistics.median(x / y for x, y in zip(seconds[name], beside, strict=True))
            rows[-1] += [median[name] * 1e3, ratio]
            if name != "small norm" and case == DTENSORS:
                goals.append(results.at_most(f"{case} {name}, microseconds", median[name] * 1e6, 300))
            elif name != "small norm":
                goals.append(results.at_most(f"{case} {name}, of torch's time", ratio, 0.6))
    notes = [f"Medians of {args.rounds} rounds, of the DTensors ten times as many."]
    title = "Clipping by the norm"
    results.report(args.json, "clip", title, columns, rows, threads=args.threads, goals=goals, notes=notes)


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cases: dict[str, Callable[[], Params]] = {
        "48M float32": partial(large, torch.float32),
        "48M bfloat16": partial(large, torch.bfloat16),
        DTENSORS: small,
    }
    report(
        args,
        {case: measure(make(), args.rounds * (10 if make is small else 1)) for case, make in cases.items()},
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
