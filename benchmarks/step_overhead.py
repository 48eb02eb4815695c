"""Cost of a step beside the arithmetic: 300 tensors of 16 elements, so that the kernels have next to nothing to do.

The parameters are plain, DTensors on a mesh of one rank, those of an FSDP2 or FSDP1 model or of a
ZeroRedundancyOptimizer: all in this process, whose process group has one rank. "same" steps with the same gradient
objects again and again; "fresh" with new ones in every step, as a training loop makes them (only the step is timed).
Contenders take turns there, as in step_cpu.py, so that each finds cold caches; "alone" is the same as "same", but each
contender by itself with warm ones. Medians are reported.

    python benchmarks/step_overhead.py --threads 1 2 --json
    python benchmarks/step_overhead.py --threads 1 --params plain dtensor
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor

import results
import shardopt
from measuring import in_turn
from results import Cell, Column
from step_cpu import CONTENDERS, Params

Step = Callable[[], object]
Kind = Callable[[int, int], Params]


class Tensors(nn.Module):
    """A model of so many vectors."""

    def __init__(self, tensors: int, numel: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(numel) for _ in range(tensors))

    def forward(self) -> Tensor:
        return torch.stack([vector.sum() for vector in self.vectors]).sum()


_models: list[nn.Module] = []


def kept(model: nn.Module) -> Params:
    """The parameters of a model that stays alive: FSDP1 asks it what they are."""
    _models.append(model)
    return list(model.parameters())


def plain(tensors: int, numel: int) -> Params:
    return [nn.Parameter(torch.ones(numel)) for _ in range(tensors)]


def dtensor(tensors: int, numel: int) -> Params:
    mesh = init_device_mesh("cpu", (1,))
    return [nn.Parameter(distribute_tensor(torch.ones(numel), mesh, [Shard(0)])) for _ in range(tensors)]


def fsdp2(tensors: int, numel: int) -> Params:
    model = Tensors(tensors, numel)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return kept(model)


def fsdp1(tensors: int, numel: int) -> Params:
    model = FullyShardedDataParallel(Tensors(tensors, numel), use_orig_params=True, device_id=torch.device("cpu"))
    model().backward()  # leaves the parameters sharded
    return kept(model)


PARAMS: dict[str, Kind] = {"plain": plain, "dtensor": dtensor, "fsdp2": fsdp2, "fsdp1": fsdp1, "zero1": plain}
NAMES = ("shardopt log8", "torch fused", "torch foreach")
ZERO1 = {
    "shardopt log8": (shardopt.AdamW, {"codec": "log8"}),
    "torch fused": (torch.optim.AdamW, {"fused": True}),
    "torch foreach": (torch.optim.AdamW, {"foreach": True}),
}


def step_of(name: str, kind: str, params: Params) -> Step:
    if kind != "zero1":
        return CONTENDERS[name](params).step
    optimizer, options = ZERO1[name]
    return ZeroRedundancyOptimizer(params, optimizer, lr=1e-4, **options).step


def new_gradients(params: Params) -> None:
    """Gives every parameter a new gradient, in memory of its own."""
    for param in params:
        param.grad = torch.full_like(param, 1e-3)


def measure(kinds: list[str], tensors: int, numel: int, rounds: int) -> dict[tuple[str, str, str], float]:
    """Median seconds by parameters, contender and kind of gradients, after 10 unmeasured rounds."""
    runs: dict[tuple[str, str, str], tuple[Params, Step]] = {}
    for kind, name, gradients in product(kinds, NAMES, ("same", "fresh")):
        params = PARAMS[kind](tensors, numel)
        new_gradients(params)
        runs[kind, name, gradients] = (params, step_of(name, kind, params))
    fresh = {key: params for key, (params, _) in runs.items() if key[2] == "fresh"}
    steps = {key: step for key, (_, step) in runs.items()}
    seconds = in_turn(steps, rounds, unmeasured=10, before=lambda key: new_gradients(fresh.get(key, [])))
    for kind, name in product(kinds, NAMES):
        alone = kind, name, "alone"
        seconds |= in_turn({alone: steps[kind, name, "same"]}, rounds, unmeasured=10)
    return {key: statistics.median(times) for key, times in seconds.items()}


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--numel", type=int, default=16, help="elements per tensor")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--params", choices=PARAMS, nargs="+", default=list(PARAMS))
    args = parser.parse_args()
    rows: list[list[Cell]] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for threads in args.threads:
        torch.set_num_threads(threads)
        found = measure(args.params, args.tensors, args.numel, args.rounds)
        for kind, name in product(args.params, NAMES):
            times = (found[kind, name, which] * 1e6 for which in ("same", "fresh", "alone"))
            rows.append([f"{kind}, {name}{f', {threads} threads' if threads > 1 else ''}", *times])
    dist.destroy_process_group()
    columns = [Column(""), *(Column(name, "us", 0) for name in ("same gradients", "new gradients", "alone"))]
    same, alone = ({str(row[0]): float(row[at]) for row in rows} for at in (1, 3))  # type: ignore[arg-type]
    ours, fused = "plain, shardopt log8", "plain, torch fused"
    goals = [
        results.at_most("a step alone, in microseconds", alone.get(ours), 40),
        results.at_least("torch fused's time over log8's", results.ratio(same.get(fused), same.get(ours)), 1.5),
    ]
    notes = [
        f"{args.tensors} tensors of {args.numel} elements; medians of {args.rounds} rounds.",
        "The first two columns are interleaved, so with cold caches.",
    ]
    results.report(args.json, "step_overhead", "Calling a step", columns, rows, threads=1, goals=goals, notes=notes)


if __name__ == "__main__":
    main()
