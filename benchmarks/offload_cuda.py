#!/usr/bin/env python3
"""Times a step with offloaded state on a GPU against one without, and its copies against plain ones.

    python benchmarks/offload_cuda.py [--millions 500] [--rounds 20] [--json FILE]

One bfloat16 model of layers of 4096 x 4096; variants take turns. The bandwidth is that of the state's bytes in each
direction while both are busy; beside it stands that of torch's own copies of locked memory, also both ways at once.
Goal: "state" reaches 0.85 of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch.nn import Parameter

import shardopt

SIZE = 4096
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
    runs: dict[str, Any] = {name: _Run(layers, offload) for name, offload in VARIANTS.items()}
    for run in runs.values():
        run.step()
    times: dict[str, list[float]] = {name: [] for name in runs}
    copies: list[float] = []
    copy = _BothWays()
    for _ in range(options.rounds):
        for name, run in runs.items():
            times[name].append(_timed(run.step))
        copies.append(_timed(copy))
    report(runs, times, copies, options)


VARIANTS = {"no offload": None, "state": "state", "step": "step"}


class _Run:
    def __init__(self, layers: int, offload: str | None) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        make = lambda: torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16, generator=generator)  # noqa: E731
        self.params = [Parameter(make()) for _ in range(layers)]
        for param in self.params:
            param.grad = make()
        self.optimizer = shardopt.AdamW8bit(self.params, offload=offload)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.synchronize()


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


def report(runs: dict[str, Any], times: dict[str, list[float]], copies: list[float], options: Any) -> None:
    """Prints the medians."""
    plain = COPY_BYTES / statistics.median(copies) / 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {' '.join(sys.argv)}")
    print(f"plain copies, both ways at once: {plain:.1f} GB/s each")
    found: dict[str, Any] = {"plain GB/s": plain}
    for name, run in runs.items():
        seconds = statistics.median(times[name])
        memory = shardopt.memory_report(run.optimizer)
        row = {"ms": 1e3 * seconds, "device MiB": (memory.device.state + memory.device.scales) / 2**20}
        if name == "state":
            moved = memory.host.state + memory.host.scales + memory.host.master_weights
            row |= {"GB/s each way": moved / seconds / 1e9, "of plain copies": moved / seconds / 1e9 / plain}
        found[name] = row
        print(f"{name:12}" + "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
