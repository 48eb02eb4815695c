"""What gradients in 8 bits cost in accuracy.

    python benchmarks/gradient_drift.py [--scenario NAME ...] [--json]

AdamW with float32 state runs freely on the mean of two ranks' gradients, exact and reduced in 8 bits, on the streams of
free_running.py: E4M3 with several kinds of scales, and int8, plain and companded as log8 codes the first moment.
Printed are mean |error| / mean |gradient| of the reduced gradient, and mean and worst drift after 200 steps as in
free_running.py. "RS" is FSDP2's reduce-scatter, "AR" DDP's all-reduce, which codes the mean once more.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from free_running import SCENARIOS
from torch import Tensor

import results
from results import Cell, Column
from shardopt.comm.wire import Wire

RANKS = 2
STEPS = 200
ROWS = 64

Coder = Callable[[Tensor], Tensor]


def message_coder(x: Tensor) -> Tensor:
    """Through shardopt's wire, whose scale is a power of two per 128 elements."""
    wire = Wire("e4m3", [(1, x.numel())])
    return wire.decode(wire.encode(x.view(1, -1))[0]).view_as(x)


def e4m3(block: int, scale_dtype: torch.dtype) -> Coder:
    """With the largest magnitude of each block at 448."""

    def code(x: Tensor) -> Tensor:
        blocks = x.view(-1, block)
        scale = (blocks.abs().amax(1, keepdim=True) / 448).to(scale_dtype).float()
        y = torch.where(scale > 0, blocks / scale, 0.0).clamp(-448, 448)
        return (y.to(torch.float8_e4m3fn).float() * scale).view_as(x)

    return code


def int8(x: Tensor) -> Tensor:
    blocks = x.view(-1, 128)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return (torch.where(scale > 0, blocks / scale, 0.0).round() * scale).view_as(x)


def companded(x: Tensor) -> Tensor:
    """The first moment's code of log8, in units of the block's largest magnitude."""
    blocks = x.view(-1, 128)
    scale = blocks.abs().amax(1, keepdim=True)
    y = torch.where(scale > 0, blocks.abs() / scale, 0.0)
    z = (127 * y * (1.7 - 0.7 * y)).round().double() / 127
    decoded = (1.7 - (1.7**2 - 4 * 0.7 * z).sqrt()) / (2 * 0.7)
    return (decoded.float() * scale * blocks.sign()).view_as(x)


CODERS: dict[str, Coder] = {
    "bf16": lambda x: x.bfloat16().float(),
    "E4M3, a power of two per 128 (shardopt)": message_coder,
    "E4M3, float32 per 128": e4m3(128, torch.float32),
    "E4M3, bfloat16 per 128": e4m3(128, torch.bfloat16),
    "int8, float32 per 128": int8,
    "companded int8, float32 per 128": companded,
}
WAYS = [f"{name}, {reduction}" for name in CODERS for reduction in ("RS", "AR")]


class Run:
    """AdamW on reduced gradients."""

    def __init__(self, reduce: Callable[[list[Tensor]], Tensor]) -> None:
        self._reduce = reduce
        self.moved = self._m = self._v = torch.zeros(())
        self.largest = self.error = 0.0

    def step(self, t: int, gradients: list[Tensor], exact: Tensor, eps: float) -> None:
        g = self._reduce(gradients)
        if exact.any():
            self.error += float((g - exact).abs().mean() / exact.abs().mean()) / STEPS
        self._m, self._v = 0.9 * self._m + 0.1 * g, 0.999 * self._v + 0.001 * g * g
        update = self._m / (1 - 0.9**t) / ((self._v / (1 - 0.999**t)).sqrt() + eps)
        self.moved = self.moved - update
        self.largest = max(self.largest, float(update.abs().max()))


def mean(gradients: list[Tensor]) -> Tensor:
    return sum(gradients, torch.zeros(())) / len(gradients)


def drift(scenario: str) -> dict[str, list[Cell]]:
    """By way of reduction: error, mean drift and worst drift."""
    stream = SCENARIOS[scenario]
    draw = stream.make(ROWS, torch.Generator().manual_seed(0))
    runs = {"exact": Run(mean)}
    for name, coder in CODERS.items():
        runs[f"{name}, RS"] = Run(lambda gradients, coder=coder: mean([coder(g) for g in gradients]))
        runs[f"{name}, AR"] = Run(lambda gradients, coder=coder: coder(mean([coder(g) for g in gradients])))
    for t in range(1, STEPS + 1):
        gradients = [(draw(t) * stream.scale).contiguous() for _ in range(RANKS)]
        for run in runs.values():
            run.step(t, gradients, mean(gradients), 1e-8 * stream.scale)
    exact = runs.pop("exact")
    found: dict[str, list[Cell]] = {}
    for name, run in runs.items():
        difference = (run.moved - exact.moved).abs()
        average, worst = difference.mean() / exact.moved.abs().mean(), difference.max() / exact.largest
        found[name] = [run.error, float(average), float(worst)]
    return found


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    by_scenario = {scenario: drift(scenario) for scenario in arguments.scenario}
    columns = [Column("")]
    for scenario in by_scenario:
        columns += [Column(f"{scenario}, {name}", digits=4) for name in ("error", "drift")]
        columns.append(Column(f"{scenario}, worst", digits=2))
    rows = ([name, *chain.from_iterable(found[name] for found in by_scenario.values())] for name in WAYS)
    notes = ["Mean |error| / mean |gradient|; mean |difference| / mean |movement|."]
    title = f"Gradients in 8 bits: error of the mean of {RANKS} ranks, and drift of AdamW after {STEPS} steps"
    results.report(arguments.json, "gradient_drift", title, columns, rows, threads=1, notes=notes)


if __name__ == "__main__":
    main()
