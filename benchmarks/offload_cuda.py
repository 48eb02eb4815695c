#!/usr/bin/env python3
"""Times a step with offloaded state on a GPU against one without, and its copies against plain ones.

    python benchmarks/offload_cuda.py [--millions 500] [--rounds 20] [--json FILE]

One bfloat16 model of layers of 4096 x 4096; variants take turns. The bandwidth is that of the state's bytes in each
direction while both are busy; beside it stands that of torch's own copies of locked memory, also both ways at once.
Goal: "state" reaches 0.85 of it. "peak / estimate" is the most that the allocator gave for weights, gradients and two
steps, over what `shardopt estimate` says. Goal: within 2%.

A second table is of whole training steps with released gradients, several in a row. "hidden" is the share of the
copies' time, at the speed of plain copies, that a step does not take longer than without offload. "step, overlap" goes
on during the next forward pass, and up to half of the gradients wait.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

import shardopt
from shardopt.estimate import Model, ParameterShape, Setup, estimate

SIZE = 4096
TOKENS = 8192
COPY_BYTES = 256 << 20


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=500, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("got no CUDA device, expected one")
    layers = max(round(options.millions * 1e6 / SIZE**2), 1)
    copy = _BothWays()
    copies = [_timed(copy) for _ in range(options.rounds)]
    plain = COPY_BYTES / statistics.median(copies) / 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {' '.join(sys.argv)}")
    print(f"plain copies, both ways at once: {plain:.1f} GB/s each")
    found: dict[str, Any] = {"plain GB/s": plain, "peak / estimate": peaks(layers)}
    for title, kind in (("step", _Run), ("training step", _Training)):
        print(f"\n{title}")
        runs = {name: kind(layers, offload) for name, offload in kind.variants.items()}
        times = _interleaved(runs, max(options.rounds // kind.in_a_row, 1))
        found[title] = report(runs, times, plain)
    speed = found["step"]["state"]["of plain copies"]
    worst = max(abs(peak - 1) for peak in found["peak / estimate"].values())
    print(f"\ngoals: {speed:.2f} of plain copies, at least 0.85: {'met' if speed >= 0.85 else 'MISSED'};", end=" ")
    print(f"peaks {100 * worst:.1f}% off the estimate, at most 2%: {'met' if worst <= 0.02 else 'MISSED'}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


class _Run:
    """Parameters with gradients, and their steps."""

    variants: Mapping[str, str | None] = {"no offload": None, "state": "state", "step": "step"}
    in_a_row = 1

    def __init__(self, layers: int, offload: str | None) -> None:
        self.params = [Parameter(_values(SIZE, SIZE)) for _ in range(layers)]
        for param in self.params:
            param.grad = _values(SIZE, SIZE)
        self.optimizer = shardopt.AdamW8bit(self.params, offload=offload)

    def run(self) -> None:
        """Takes so many steps in a row, to their end."""
        for _ in range(self.in_a_row):
            self.step()
        self.optimizer.synchronize()

    def step(self) -> None:
        """Begins a step."""
        self.optimizer.step()


class _Training(_Run):
    """A model whose gradients are released as the backward pass makes them."""

    variants: Mapping[str, str | None] = {**_Run.variants, "step, overlap": "overlap"}
    in_a_row = 4

    def __init__(self, layers: int, offload: str | None) -> None:
        self.model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(layers)))
        self.model.to("cuda", torch.bfloat16)
        self.params = list(self.model.parameters())
        self.batch = _values(TOKENS, SIZE)
        overlaps = offload == "overlap"
        self.optimizer = shardopt.AdamW8bit(self.params, offload="step" if overlaps else offload)
        waiting = {"waiting_gradients": layers // 2} if overlaps else {}
        shardopt.release_gradients(self.model, self.optimizer, overlap_forward=overlaps, **waiting)

    def step(self) -> None:
        self.model(self.batch).float().square().mean().backward()
        super().step()


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _interleaved(runs: dict[str, _Run], rounds: int) -> dict[str, float]:
    """Median seconds of a step by variant."""
    for run in runs.values():
        run.run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_timed(run.run) / run.in_a_row)
    return {name: statistics.median(found) for name, found in times.items()}


class _BothWays:
    """Plain copies of locked memory to the device and back at once."""

    def __init__(self) -> None:
        self.host = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.device = [torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self.streams = [torch.cuda.Stream() for _ in range(2)]

    def __call__(self) -> None:
        with torch.cuda.stream(self.streams[0]):
            self.device[0].copy_(self.host[0], non_blocking=True)
        with torch.cuda.stream(self.streams[1]):
            self.host[1].copy_(self.device[1], non_blocking=True)


def _timed(work: Any) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def report(runs: dict[str, _Run], seconds: dict[str, float], plain: float) -> dict[str, dict[str, float]]:
    """Prints a row per variant, and returns them."""
    found = {}
    numel = len(next(iter(runs.values())).params) * SIZE**2
    for name, run in runs.items():
        memory = shardopt.memory_report(run.optimizer)
        row = {"ms": 1e3 * seconds[name]}
        state = memory.host.state + memory.host.scales + memory.host.master_weights
        each_way = {"no offload": 0, "state": state}.get(name, 4 * numel)  # "step": parameters and gradients come
        if isinstance(run, _Training):
            if each_way:
                longer = seconds[name] - seconds["no offload"]
                row["hidden"] = 1 - longer / (each_way / plain / 1e9)
        else:
            row["state on device MiB"] = (memory.device.state + memory.device.scales) / 2**20
            if name == "state":
                row["GB/s each way"] = each_way / seconds[name] / 1e9
                row["of plain copies"] = row["GB/s each way"] / plain
        found[name] = row
        print(f"{name:14}" + "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
    return found


def peaks(layers: int) -> dict[str, float]:
    """The most that parameters, gradients and two steps take of the device, over what the estimate says, by variant."""
    model = Model("layers", tuple(ParameterShape((SIZE, SIZE), layer) for layer in range(layers)))
    found = {}
    for name, offload in _Run.variants.items():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run = _Run(layers, offload)
        run.run()
        run.run()
        torch.cuda.synchronize()
        used = torch.cuda.max_memory_allocated() - before
        found[name] = used / estimate(model, Setup(options={"offload": offload})).device.total
        print(f"{name:14}peak / estimate {found[name]:.3f}")
        del run
    gc.collect()
    return found


if __name__ == "__main__":
    main()
