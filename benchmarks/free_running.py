"""How far 8-bit AdamW drifts from float32 AdamW when both run freely on the same gradients.

    python benchmarks/free_running.py [--elements N] [--scenario NAME ...]

For each scenario and codec two figures after 200 steps, both against torch.optim.AdamW in float32:

    mean    mean |difference| / mean |movement|
    worst   largest |difference| / largest single update that float32 made

Gradients are drawn per step, the same for all codecs; nothing is fed back. ``eps`` is 1e-8 times the gradients' scale,
so that it weighs the same at every scale; there is no weight decay, which would only add movement.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import Parameter

import shardopt

COLS = 512
STEPS = 200
#: Name in the table: options.
CODECS: dict[str, dict[str, object]] = {
    "log8": {"codec": "log8"},
    "companded8": {"codec": "companded8"},
    "companded8, 32": {"codec": "companded8", "block_size": 32},
    "dynamic8, 256": {"codec": "dynamic8", "block_size": 256},
    "bf16": {"codec": "bf16"},
    "fp32": {"codec": "fp32"},
}

Gradients = Callable[[int], Tensor]


class Drift(NamedTuple):
    """How far a codec is from float32 in the end; see the module's text."""

    mean: float
    worst: float


class Scenario(NamedTuple):
    """A stream of gradients, and the drift that log8 may have on it."""

    make: Callable[[int, Generator], Gradients]  # of rows and a source of random numbers
    limit: Drift
    scale: float = 1.0


def iid(rows: int, generator: Generator) -> Gradients:
    """Every element standard normal."""
    return lambda t: torch.randn(rows, COLS, generator=generator)


def log_normal(rows: int, generator: Generator) -> Gradients:
    """Every coordinate at a scale of its own, log-normal with s = 2."""
    scale = torch.exp(2 * torch.randn(rows, COLS, generator=generator))
    return lambda t: scale * torch.randn(rows, COLS, generator=generator)


def half_sparse(rows: int, generator: Generator) -> Gradients:
    """Half of the coordinates, chosen at random, have a gradient in 5% of the steps only."""
    sparse = torch.rand(rows, COLS, generator=generator) < 0.5

    def gradients(t: int) -> Tensor:
        on = torch.rand(rows, COLS, generator=generator) < 0.05
        return torch.randn(rows, COLS, generator=generator) * (on | ~sparse)

    return gradients


def rare_rows(rows: int, generator: Generator) -> Gradients:
    """Every row, as of an embedding, has gradients in 5% of the steps only, and then in all its elements."""

    def gradients(t: int) -> Tensor:
        on = torch.rand(rows, 1, generator=generator) < 0.05
        return torch.randn(rows, COLS, generator=generator) * on

    return gradients


def spike(rows: int, generator: Generator) -> Gradients:
    """In one step, half-way, all gradients are 1e4 times as large."""
    return lambda t: torch.randn(rows, COLS, generator=generator) * (1e4 if t == STEPS // 2 else 1.0)


SCENARIOS: dict[str, Scenario] = {
    "iid": Scenario(iid, Drift(0.0125, 1.5)),
    "iid at 1e-7": Scenario(iid, Drift(0.0125, 1.5), scale=1e-7),
    "iid at 1e5": Scenario(iid, Drift(0.0125, 1.5), scale=1e5),
    "log-normal": Scenario(log_normal, Drift(0.08, 10)),
    "half sparse": Scenario(half_sparse, Drift(0.05, 5)),
    "rare rows": Scenario(rare_rows, Drift(0.015, 2)),
    "one step of 1e4": Scenario(spike, Drift(0.03, 5)),
}


def measure(scenario: Scenario, elements: int = 65536, seed: int = 0) -> dict[str, Drift]:
    """Runs AdamW with every codec beside torch's; the drift by the codec's name in :data:`CODECS`."""
    rows = -(-elements // COLS)
    gradients = scenario.make(rows, Generator().manual_seed(seed))
    eps = 1e-8 * scenario.scale
    exact = Parameter(torch.zeros(rows, COLS))
    reference = torch.optim.AdamW([exact], eps=eps, weight_decay=0.0)
    coded = {name: Parameter(torch.zeros(rows, COLS)) for name in CODECS}
    optimizers = [
        shardopt.AdamW([coded[name]], eps=eps, weight_decay=0.0, min_quantized_numel=0, **options)
        for name, options in CODECS.items()
    ]
    largest_update = 0.0
    for t in range(1, STEPS + 1):
        gradient = gradients(t) * scenario.scale
        before = exact.detach().clone()
        for param in (exact, *coded.values()):
            param.grad = gradient
        for optimizer in (reference, *optimizers):
            optimizer.step()
        largest_update = max(largest_update, float((exact.detach() - before).abs().max()))
    movement = float(exact.detach().abs().mean())
    differences = {name: (param.detach() - exact.detach()).abs() for name, param in coded.items()}
    return {
        name: Drift(float(difference.mean()) / movement, float(difference.max()) / largest_update)
        for name, difference in differences.items()
    }


def table(results: dict[str, dict[str, Drift]]) -> str:
    """A row per scenario, a column per codec."""
    lines = ["".join([f"{'mean, worst':16}", *(f"{name:>16}" for name in CODECS), f"{'limit of log8':>16}"])]
    for name, drifts in results.items():
        cells = [drifts[codec] for codec in CODECS] + [SCENARIOS[name].limit]
        lines.append("".join([f"{name:16}", *(f"{f'{d.mean:.4f}, {d.worst:.2f}':>16}" for d in cells)]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Drift of 8-bit AdamW from float32 AdamW.")
    parser.add_argument("--elements", type=int, default=262144, help="parameters (default: %(default)s)")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    arguments = parser.parse_args()
    print(f"AdamW, {STEPS} steps, {arguments.elements:,} parameters, blocks of 128; torch {torch.__version__}")
    print(table({name: measure(SCENARIOS[name], arguments.elements) for name in arguments.scenario}))


if __name__ == "__main__":
    main()
