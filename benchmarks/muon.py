"""Muon on shards: whose bits, how much the ranks send, how long a step takes, and how exact it is.

    python benchmarks/muon.py bits traffic direction
    python benchmarks/muon.py time --rounds 7 --width 128 --layers 2

Each part prints a table, and writes it with ``--json``; the ranks are processes that this one starts, with gloo.

bits: whether the weights after some steps of Muon8bit on a small model of odd sizes are those of the
unsharded run, to the bit, on all ranks. The gradient of an element is the same in every way of sharding.
traffic: the collectives that one step issues under FSDP2, and what they send from one rank to others, at most. Matrix
products are left out, because sizes alone decide what is sent. With gloo, PyTorch replaces all-to-alls of DTensors
by all-gathers.
time: medians of the slowest rank's time, one thread per rank; then of one process. Optimizers take turns.
direction: relative errors (Frobenius norm) of directions, orthogonalized in float32. Directions come from the momentum
of random gradients, coded in every step; those of shardopt's codecs from its kernels, in bfloat16 as the optimizer has
them: the line of fp32 shows what that alone does. The last line orthogonalizes the exact direction in bfloat16.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

import results
import shardopt
from decoder import Architecture, Decoder
from measuring import among_ranks, in_turn, on_ranks
from muon_ranks import WAYS, Collectives, Wrap, fsdp2, set_gradients, whole
from results import Cell, Column
from shardopt.kernels.newton_schulz import QUINTIC, NewtonSchulz

ODD = Architecture(1, 130, 350, 65, 97, modern=True)
STEPS = 3
REALISTIC = Architecture(4, 512, 1408, 256, 1024, modern=True)
TORCHS = "torch.optim.Muon"


def small(width: int, layers: int) -> Architecture:
    return Architecture(layers, width, 11 * width // 4, width // 2, 256, modern=True)


def make(architecture: Architecture) -> Decoder:
    """A model with the same weights in every process."""
    torch.manual_seed(0)
    return Decoder(architecture)


def matrices(model: nn.Module) -> list[Tensor]:
    """The parameters that Muon steps."""
    return [param for group in shardopt.muon_groups(model) if group["algorithm"] == "muon" for param in group["params"]]


# bits


def run(way: str, wrap: Wrap) -> dict[str, Tensor]:
    """The whole weights after a run."""
    model = wrap(make(ODD))
    if way == TORCHS:
        params = matrices(model)
        optimizer: Optimizer = torch.optim.Muon(params, lr=1e-2)
    else:
        params = list(model.parameters())
        groups = shardopt.muon_groups(model, lr=1e-2)
        if way == "ZeroRedundancy":
            optimizer = ZeroRedundancyOptimizer(groups, shardopt.Muon8bit, min_quantized_numel=64)
        else:
            optimizer = shardopt.Muon8bit(groups, min_quantized_numel=64)
    start = [param.detach().clone() for param in params]
    for step in range(STEPS):
        set_gradients(params, start, step)
        optimizer.step()
    return whole(model)


def compare(expected: dict[str, Tensor], torchs: dict[str, Tensor]) -> tuple[dict[str, bool], float]:
    """Whether the weights have the expected bits, by way of sharding; and torch.optim.Muon's greatest difference."""
    same = {}
    for way, (wrap, worlds) in WAYS.items():
        if dist.get_world_size() in worlds:
            got = run(way, wrap)
            equal = got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
            same[way] = bool(among_ranks([equal], dist.ReduceOp.MIN)[0])
    got, start = run(TORCHS, fsdp2), dict(make(ODD).named_parameters())
    moved = {name: (x - start[name].detach()).norm() for name, x in torchs.items()}
    return same, max(float((got[name] - x).norm() / moved[name]) for name, x in torchs.items() if moved[name])


def report_bits(args: Namespace) -> None:
    torch.set_num_threads(1)
    expected, torchs = run("plain", lambda model: model), run(TORCHS, lambda model: model)
    start = dict(make(ODD).named_parameters())
    assert not any(torch.equal(expected[name], start[name]) for name in expected), "a parameter did not move"
    found = {ranks: on_ranks(ranks, compare, expected, torchs) for ranks in (1, 2, 3, 4)}
    words = {True: "yes", False: "NO", None: "-"}
    rows: list[list[Cell]] = [[way, *(words[same.get(way)] for same, _ in found.values())] for way in WAYS]
    rows.append([f"{TORCHS}, FSDP2, differs", *(f"{differs:.2%}" for _, differs in found.values())])
    notes = [
        f"Weights after {STEPS} steps of Muon8bit (log8); {ODD}. Differs: from its own unsharded run, the most of any "
        "matrix, share of the way that the matrix moved."
    ]
    columns = [Column(""), *(Column(f"{ranks} ranks") for ranks in found)]
    results.report(args.json, "muon_bits", "Muon: the bits of the unsharded run", columns, rows, notes=notes)


# traffic


CONTENDERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "shardopt.Muon8bit": shardopt.Muon8bit,
    "shardopt.Muon fp32": shardopt.Muon,
    TORCHS: torch.optim.Muon,
}


def count() -> dict[str, list[float]]:
    """Bytes and collectives of a step, by optimizer, the greatest of any rank."""
    found = {}
    for name in ("shardopt.Muon8bit", TORCHS):
        params = matrices(fsdp2(make(REALISTIC)))
        optimizer = CONTENDERS[name](params)
        set_gradients(params, [param.detach() for param in params])
        with Collectives():
            optimizer.step()
        with Collectives() as collectives:
            optimizer.step()
        found[name] = among_ranks([collectives.sent, collectives.calls])
    return found


def report_traffic(args: Namespace) -> None:
    shapes = [tuple(param.shape) for param in matrices(make(REALISTIC))]
    numel = sum(rows * cols for rows, cols in shapes)
    columns = [Column(""), Column("sent", "bytes", 0), Column("of 4 N / R"), Column("collectives", digits=0)]
    columns.append(Column("collectives per matrix", digits=2))
    rows: list[list[Cell]] = []
    for ranks in (2, 4):
        for name, (sent, calls) in on_ranks(ranks, count).items():
            rows.append([f"{ranks} ranks, {name}", sent, sent * ranks / (4 * numel), calls, calls / len(shapes)])
    notes = [f"On the rank that sends most; N = {numel:,} in {len(shapes)} matrices, {REALISTIC}."]
    title = "Muon: bytes that a rank sends in a step under FSDP2"
    results.report(args.json, "muon_traffic", title, columns, rows, notes=notes)


# time


def measure(architecture: Architecture, rounds: int, ranks: int) -> dict[str, float]:
    """Median seconds of a step by optimizer, after one unmeasured round."""
    steps: dict[str, Callable[[], Any]] = {}
    for name, maker in CONTENDERS.items():
        model = make(architecture)
        params = matrices(fsdp2(model) if ranks else model)
        set_gradients(params, [param.detach() for param in params])
        steps[name] = maker(params).step
    seconds = in_turn(steps, rounds, unmeasured=1, before=lambda _: dist.barrier() if ranks else None)
    return {name: statistics.median(among_ranks(taken) if ranks else taken) for name, taken in seconds.items()}


def report_time(args: Namespace) -> None:
    architecture = small(args.width, args.layers)
    found = {f"FSDP2, {ranks} ranks": on_ranks(ranks, measure, architecture, args.rounds, ranks) for ranks in (2, 4)}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found[f"one process, {threads} thread{'s' * (threads > 1)}"] = measure(architecture, args.rounds, 0)
    columns = [Column(""), *(Column(name, "ms", 1) for name in CONTENDERS), Column("Muon8bit, to torch's", digits=2)]
    rows: list[list[Cell]] = []
    for case, medians in found.items():
        ours, *_, torchs = medians.values()
        rows.append([case, *(1e3 * taken for taken in medians.values()), ours / torchs])
    notes = [f"The matrices' step, medians of {args.rounds} rounds; ranks of one thread; {architecture}."]
    results.report(args.json, "muon_time", "Muon: time of a step on the CPU", columns, rows, notes=notes)


# direction

SIDE = 512  # of the matrix whose direction is measured
MOMENTS = 60  # gradients of which its momentum is made
CODECS = {
    **{codec: f"{codec}, blocks of 128" for codec in ("log8", "companded8", "dynamic8")},
    "bf16": "bf16",
    "fp32": "fp32",
}
#: Singular values, of their numbers from 1 on.
SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": torch.ones_like,
    "1 / sqrt(k)": torch.rsqrt,
    "1 / k": torch.reciprocal,
}


def gradients(spectrum: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(SIDE, SIDE, generator=generator))[0]
    left = left * SPECTRA[spectrum](torch.arange(1.0, SIDE + 1))
    return [left @ torch.randn(SIDE, SIDE, generator=generator) for _ in range(MOMENTS)]


def direction(code: Callable[[Tensor], Tensor], of: list[Tensor], momentum: float = 0.95) -> Tensor:
    """The last direction, with Nesterov's look ahead, by its formulas."""
    coded = torch.zeros_like(of[0])
    for gradient in of:
        new = coded.lerp(gradient, 1 - momentum)
        found, coded = gradient.lerp(new, momentum), code(new)
    return found


def direction_of(codec: str, of: list[Tensor]) -> Tensor:
    """The last direction that shardopt.Muon would orthogonalize."""
    seen: list[Tensor] = []

    def instead(_: NewtonSchulz, matrix: Tensor) -> Tensor:
        seen[:] = [matrix.clone()]
        return matrix

    param = nn.Parameter(torch.zeros(SIDE, SIDE))
    optimizer = shardopt.Muon([param], codec=codec, block_size=128)
    with patch.object(NewtonSchulz, "__call__", instead):
        for gradient in of:
            param.grad = gradient
            optimizer.step()
    return seen[0].float()


def linear(x: Tensor) -> Tensor:
    """Through signed linear codes in blocks of 2048."""
    blocks = x.view(-1, 2048)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return ((blocks / scales).round() * scales).view(x.shape)


def errors(spectrum: str) -> dict[str, float]:
    """By what the momentum is coded in."""
    newton_schulz = NewtonSchulz((QUINTIC,) * 5, 1e-7)
    given = gradients(spectrum)
    exact = direction(lambda x: x, given)
    found = {name: direction_of(codec, given) for codec, name in CODECS.items()}
    found["linear int8, blocks of 2048"] = direction(linear, given).bfloat16().float()
    found = {name: newton_schulz(x, in_float32=False) for name, x in found.items()}
    found["arithmetic in bfloat16 alone"] = newton_schulz(exact.bfloat16()).float()
    expected = newton_schulz(exact, in_float32=False)
    return {name: float((got - expected).norm() / expected.norm()) for name, got in found.items()}


def report_direction(args: Namespace) -> None:
    by_spectrum = [errors(spectrum) for spectrum in SPECTRA]
    columns = [Column("momentum"), *(Column(spectrum, digits=4) for spectrum in SPECTRA)]
    rows: list[list[Cell]] = [[name, *(of_one[name] for of_one in by_spectrum)] for name in by_spectrum[0]]
    title = "Muon: relative error of the orthogonalized direction by singular values"
    notes = [f"A matrix of {SIDE} x {SIDE}, after {MOMENTS} steps."]
    results.report(args.json, "muon_direction", title, columns, rows, notes=notes)


PARTS: dict[str, Callable[[Namespace], None]] = {
    "bits": report_bits,
    "traffic": report_traffic,
    "time": report_time,
    "direction": report_direction,
}


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=7, help="of time")
    parser.add_argument("--width", type=int, default=128, help="of the model in time")
    parser.add_argument("--layers", type=int, default=2, help="of the model in time")
    args = parser.parse_args()
    for part in args.parts:
        PARTS[part](args)


if __name__ == "__main__":
    main()
