#!/usr/bin/env python3
"""Times a step with offloaded state on a GPU against one without, and its copies against plain ones.

    python benchmarks/offload_cuda.py [--millions 500] [--rounds 20] [--json]

One bfloat16 model of layers of 4096 x 4096; variants take turns. The bandwidth is that of the state's bytes in each
direction while both are busy; beside it stands that of torch's own copies of locked memory, also both ways at once.
Goal: "state" reaches 0.85 of it.

"training step" is a whole one with released gradients, several in a row. "hidden" is the share of the
copies' time, at the speed of plain copies, that a step does not take longer than without offload. "step, overlap" goes
on during the next forward pass, and up to half of the gradients wait.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import Parameter

import results
import shardopt
from measuring import in_turn
from results import Cell, Column

SIZE = 4096
TOKENS = 8192
COPY_BYTES = 256 << 20


def main() -> None:
    """Runs the benchmark."""
    parser = results.parser(__doc__)
    parser.add_argument("--millions", type=float, default=500, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("got no CUDA device, expected one")
    layers = max(round(options.millions * 1e6 / SIZE**2), 1)
    (copies,) = _in_turn({"copy": _BothWays()}, options.rounds).values()
    plain = COPY_BYTES / copies / 1e9
    rows: list[list[Cell]] = []
    for title, kind in KINDS.items():
        runs = {name: kind(layers, offload) for name, offload in kind.variants.items()}
        times = _in_turn({name: run.run for name, run in runs.items()}, max(options.rounds // kind.in_a_row, 1))
        seconds = {name: found / kind.in_a_row for name, found in times.items()}
        for name, run in runs.items():
            rows.append([f"{title}, {name}", *figures(run, name, seconds, plain)])
    columns = [Column(""), Column("median", "ms", 2), Column("state on device", "MiB", 1)]
    columns += [Column("each way", "GB/s", 1), Column("of plain copies", digits=2), Column("hidden", digits=2)]
    speed = next(row[4] for row in rows if row[0] == "step, state")
    goals = [
        results.at_least("the speed of plain copies that offloaded state reaches", speed, 0.85),  # type: ignore[arg-type]
    ]
    notes = [
        f"{layers} matrices of {SIZE} x {SIZE} in bfloat16; medians of {options.rounds} rounds; plain copies, both "
        f"ways at once, {plain:.1f} GB/s each."
    ]
    title = f"Offloaded state on {torch.cuda.get_device_name()}"
    results.report(options.json, "offload_cuda", title, columns, rows, goals=goals, notes=notes)


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


KINDS: dict[str, type[_Run]] = {"step": _Run, "training step": _Training}


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _in_turn(acts: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each act, to the end of the device's work."""

    def finished(act: Callable[[], object]) -> None:
        act()
        torch.cuda.synchronize()

    ends = {name: partial(finished, act) for name, act in acts.items()}
    seconds = in_turn(ends, rounds, unmeasured=1, before=lambda _: torch.cuda.synchronize())
    return {name: statistics.median(found) for name, found in seconds.items()}


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


def figures(run: _Run, name: str, seconds: dict[str, float], plain: float) -> list[Cell]:
    """Cells of a variant; ``plain`` is the speed of plain copies in GB/s."""
    memory = shardopt.memory_report(run.optimizer)
    on_device: Cell = (memory.device.state + memory.device.scales) / 2**20
    state = memory.host.state + memory.host.scales + memory.host.master_weights
    numel = len(run.params) * SIZE**2
    each_way = {"no offload": 0, "state": state}.get(name, 4 * numel)  # "step": parameters and gradients come
    speed = hidden = None
    if isinstance(run, _Training):
        on_device = None
        if each_way:
            hidden = 1 - (seconds[name] - seconds["no offload"]) / (each_way / plain / 1e9)
    elif name == "state":
        speed = each_way / seconds[name] / 1e9
    return [1e3 * seconds[name], on_device, speed, results.ratio(speed, plain), hidden]


if __name__ == "__main__":
    main()
