"""Times the step of every optimizer on the CPU, beside torch.optim's of the same name, and measures 8-bit drift.

    python benchmarks/optimizers.py [--numel N] [--rounds N] [--threads N] [--drift-steps N] [--json]

Steps are interleaved: each round takes one step of every optimizer. Per optimizer it prints the median time of a step
with log8 in ns per float32 parameter, its ratio to AdamW8bit's in the same run, the time of torch.optim's (fused where
torch has that on the CPU, else foreach), bytes of state per parameter, and the drift after free-running steps: the mean
difference to float32 state over the mean movement.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import results
import shardopt
from measuring import in_turn
from results import Cell, Column

#: Class, and the options of a variant.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {}),
    "AdamW amsgrad": ("AdamW", {"amsgrad": True}),
    "NAdam": ("NAdam", {}),
    "RAdam": ("RAdam", {}),
    "Adamax": ("Adamax", {}),
    "AdEMAMix": ("AdEMAMix", {}),
    "ADOPT": ("ADOPT", {}),
    "Adan": ("Adan", {}),
    "Adagrad": ("Adagrad", {}),
    "RMSprop": ("RMSprop", {}),
    "RMSprop momentum": ("RMSprop", {"momentum": 0.9}),
    "RMSprop centered": ("RMSprop", {"centered": True}),
    "SGD momentum": ("SGD", {"momentum": 0.9}),
    "Lion": ("Lion", {}),
    "Signum": ("Signum", {}),
    "LAMB": ("LAMB", {}),
    "LARS": ("LARS", {}),
    "StableAdamW": ("StableAdamW", {}),
    "Prodigy": ("Prodigy", {}),
    "AdamW cautious": ("AdamW", {"cautious": True}),
    "AdamW cautious decay": ("AdamW", {"cautious_weight_decay": True}),
    "Lion cautious": ("Lion", {"cautious": True}),
}
COLS = 4096


def params_of(numel: int) -> list[Parameter]:
    param = Parameter(torch.randn(numel // COLS, COLS))
    param.grad = 1e-3 * torch.randn_like(param)
    return [param]


def torch_class(name: str, options: dict[str, Any]) -> type[Optimizer] | None:
    """torch.optim's class of this name, if it has one that takes the options."""
    kind: type[Optimizer] | None = getattr(torch.optim, name, None)
    return kind if kind is not None and options.keys() <= inspect.signature(kind).parameters.keys() else None


def torchs(name: str, options: dict[str, Any], numel: int) -> Optimizer | None:
    kind: Any = torch_class(name, options)
    if kind is None:
        return None
    try:
        return kind(params_of(numel), **options, fused=True)
    except (TypeError, RuntimeError):
        return kind(params_of(numel), **options, foreach=True)


def timed(numel: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, by name."""
    runs: dict[str, Optimizer] = {}
    for case, (name, options) in CASES.items():
        runs[case] = getattr(shardopt, f"{name}8bit")(params_of(numel), **options)
        theirs = torchs(name, options, numel)
        if theirs is not None:
            runs[f"torch {case}"] = theirs
    return in_turn({case: optimizer.step for case, optimizer in runs.items()}, rounds)


def drift(name: str, options: dict[str, Any], steps: int) -> float:
    """Mean difference of the parameters to those with float32 state, over their mean movement."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, 1024, generator=generator)
    scale = torch.randn(64, 1024, generator=generator).exp()
    runs = [getattr(shardopt, name)([Parameter(start.clone())], codec=codec, **options) for codec in ("log8", "fp32")]
    for _ in range(steps):
        gradient = scale * torch.randn(64, 1024, generator=generator)
        for optimizer in runs:
            optimizer.param_groups[0]["params"][0].grad = gradient
            optimizer.step()
    coded, exact = (optimizer.param_groups[0]["params"][0].detach() for optimizer in runs)
    return float((coded - exact).abs().mean() / (exact - start).abs().mean())


def state_bytes(name: str, options: dict[str, Any]) -> float:
    (param,) = params_of(64 * COLS)
    optimizer = getattr(shardopt, f"{name}8bit")([param], **options)
    optimizer.step()
    return sum(x.nbytes for key, x in optimizer.state[param].items() if key != "step") / param.numel()


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--numel", type=int, default=4 << 20, help="parameters of each optimizer")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--drift-steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    times = {
        case: statistics.median(taken) * 1e9 / args.numel for case, taken in timed(args.numel, args.rounds).items()
    }
    columns = [
        Column("optimizer"),
        Column("ns per parameter", digits=2),
        Column("to AdamW8bit", digits=2),
        Column("torch.optim", "ns", 2),
        Column("state", "bytes", 3),
        Column("drift", digits=3),
    ]

    def rows() -> Iterator[list[Cell]]:
        for case, (name, options) in CASES.items():
            ns, torchs_ns = times[case], times.get(f"torch {case}")
            more = state_bytes(name, options), drift(name, options, args.drift_steps)
            yield [case, ns, ns / times["AdamW"], torchs_ns, *more]

    notes = [f"log8, {args.numel:,} float32 parameters each; drift after {args.drift_steps} free-running steps."]
    results.report(args.json, "optimizers", "Every optimizer", columns, rows(), threads=args.threads, notes=notes)


if __name__ == "__main__":
    main()
