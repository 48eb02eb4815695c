"""Time per element of coding gradients into bytes and of adding them up, and what that costs in accuracy.

    python benchmarks/gradient_bytes.py [--elements N] [--rounds N] [--threads N] [--json]
    python benchmarks/gradient_bytes.py --drift [--scenario NAME ...] [--json]

Times are those of the kernels of each instruction set, fastest and median of the rounds, in ns per element of the
result. ``--elements`` says how many there are: by default they lie in the second-level cache.

``--drift`` has AdamW with float32 state run freely on the mean of two ranks' gradients, exact and reduced in 8 bits, on
the streams of free_running.py: E4M3 with several kinds of scales, and int8, plain and companded as log8 codes the first
moment. Printed are mean |error| / mean |gradient| of the reduced gradient, and mean and worst drift after 200 steps as
in free_running.py. "RS" is FSDP2's reduce-scatter, "AR" DDP's all-reduce, which codes the mean once more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from unittest import mock

import torch
from torch import Tensor

import results
from free_running import SCENARIOS
from measuring import seconds_of
from results import Cell, Column
from shardopt import _C
from shardopt.comm.wire import WIRES, Wire
from shardopt.kernels.messages import add_up

RANKS = 2
STEPS = 200
ROWS = 64
TERMS = (1, 2, 8)

Coder = Callable[[Tensor], Tensor]


def per_element(act: Callable[[], object], numel: int, rounds: int) -> list[Cell]:
    """Fastest and median ns per element."""
    repeats = max(1, 1_000_000 // numel)

    def repeated() -> None:
        for _ in range(repeats):
            act()

    times = [seconds_of(repeated) / repeats / numel * 1e9 for _ in range(rounds)]
    return [min(times), statistics.median(times)]


def times(numel: int, rounds: int) -> Iterator[list[Cell]]:
    """Of the kernels alone, in memory that is there already, and of torch's sum of float32 terms."""
    terms, out = torch.randn(max(TERMS), numel), torch.empty(numel)
    sums = (per_element(partial(sum_of_terms, terms[:t], out), numel, rounds) for t in TERMS)
    yield ["torch, sums, fp32", None, None, *chain.from_iterable(sums)]
    for target, wire in product(_C.cpu_targets(), WIRES):
        with mock.patch("shardopt.kernels.messages.cpu_target", lambda target=target: target):
            form = Wire(wire, [(1, numel)])  # type: ignore[arg-type]
            message = form.encode(terms)
            found: list[Cell] = [None, None]
            if wire != "fp32":
                found = per_element(partial(form.encode, terms[:1]), numel, rounds)
            for t in TERMS:
                add = partial(add_up, message[:t], form.layout, mean=out, divisor=t)
                found += per_element(add, numel, rounds)
        yield [f"{target}, {wire}", *found]


def sum_of_terms(terms: Tensor, out: Tensor) -> None:
    out.copy_(terms[0])
    for term in terms[1:]:
        out.add_(term)


def message_coder(x: Tensor) -> Tensor:
    """Codes and decodes with the kernels, whose scale is a power of two per 128 elements."""
    out, form = torch.empty_like(x), Wire("e4m3", [(1, x.numel())])
    add_up(form.encode(x.view(1, -1)), form.layout, out=[out.view(-1)])
    return out


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
    parser.add_argument("--elements", type=int, default=49_152)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--drift", action="store_true")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    arguments = parser.parse_args()
    columns = [Column("")]
    if arguments.drift:
        torch.set_num_threads(1)
        by_scenario = {scenario: drift(scenario) for scenario in arguments.scenario}
        for scenario in by_scenario:
            columns += [Column(f"{scenario}, {name}", digits=4) for name in ("error", "drift")]
            columns.append(Column(f"{scenario}, worst", digits=2))
        rows = ([name, *chain.from_iterable(found[name] for found in by_scenario.values())] for name in WAYS)
        notes = ["Mean |error| / mean |gradient|; mean |difference| / mean |movement|."]
        title = f"Gradients in 8 bits: error of the mean of {RANKS} ranks, and drift of AdamW after {STEPS} steps"
        results.report(arguments.json, "gradient_drift", title, columns, rows, threads=1, notes=notes)
        return
    torch.set_num_threads(arguments.threads)
    for name in ("encode", *(f"mean of {t}" for t in TERMS)):
        columns += [Column(f"{name}, {which}", "ns", 3) for which in ("fastest", "median")]
    measured = times(arguments.elements, arguments.rounds)
    title = f"Ordered gradients: ns per element of the mean, {arguments.elements:,} elements"
    results.report(arguments.json, "gradient_bytes", title, columns, measured, threads=arguments.threads)


if __name__ == "__main__":
    main()
