"""What a step costs beside the arithmetic: 300 tensors of 16 elements, so that the kernels have next to nothing to do.

"same" steps with the same gradient objects again and again; "fresh" with new ones in every step, as a training loop
makes them (only the step is timed). Contenders take turns there, as in step_cpu.py, so that each finds cold caches;
"alone" is the same as "same", but each contender by itself with warm ones. Medians are reported.

    python benchmarks/step_overhead.py --threads 1 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from step_cpu import CONTENDERS, Params, commit, machine

NAMES = ("shardopt log8", "torch fused", "torch foreach")


def new_gradients(params: Params) -> None:
    """Gives every parameter a new gradient, in memory of its own."""
    for param in params:
        param.grad = torch.full_like(param, 1e-3)


def measure(tensors: int, numel: int, rounds: int) -> dict[tuple[str, str], float]:
    """Median seconds by contender and kind of gradients, after 10 unmeasured rounds."""
    runs: dict[tuple[str, str], tuple[Params, Callable[[], object]]] = {}
    for name in NAMES:
        for gradients in ("same", "fresh"):
            params = [torch.nn.Parameter(torch.ones(numel)) for _ in range(tensors)]
            new_gradients(params)
            runs[name, gradients] = (params, CONTENDERS[name](params).step)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(rounds + 10):
        for key, (params, step) in runs.items():
            if key[1] == "fresh":
                new_gradients(params)
            seconds[key].append(timed(step))
    for name in NAMES:
        _, step = runs[name, "same"]
        seconds[name, "alone"] = [timed(step) for _ in range(rounds + 10)]
    return {key: statistics.median(times[10:]) for key, times in seconds.items()}


def timed(step: Callable[[], object]) -> float:
    """Seconds that a step takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--numel", type=int, default=16, help="elements per tensor")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    print(f"{machine()}, commit {commit()}, medians of {args.rounds} rounds")
    for threads in args.threads:
        torch.set_num_threads(threads)
        found = measure(args.tensors, args.numel, args.rounds)
        print(f"\n{args.tensors} tensors of {args.numel} elements, {threads} threads, microseconds per step")
        print(f"{'':26}{'same gradients':>16}{'fresh gradients':>17}{'same, alone':>14}")
        for name in NAMES:
            same, fresh, alone = (found[name, kind] * 1e6 for kind in ("same", "fresh", "alone"))
            print(f"{name:26}{same:16.1f}{fresh:17.1f}{alone:14.1f}")


if __name__ == "__main__":
    main()
