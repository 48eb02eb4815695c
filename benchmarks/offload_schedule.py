"""The share of the CPU's step that hides beside the GPU's work, with ``offload="step"`` and ``overlap_forward``.

Shardopt's scheduler runs on the CPU with a stand-in for the GPU (stand_in_device.py): hooks, thread, queue, slots and
waits are real; times are those of a model of the machine (shardopt/estimate/hiding.py), and virtual, so that any
machine prints the same. No GPU was measured. Each case trains with clipping by the global norm; the last of a few steps
counts.

"for the step" is the time that the GPU waits, for whatever reason, between ``optimizer.step()`` and the end of the next
forward pass, and "hidden" 1 less its ratio to the time of the CPU's steps; "for gradients" is the other time that it
waits. "90% from": tokens of a micro-batch per GPU from which on 90% hides. "device": bytes per parameter of weights,
and of the most gradients at once. "ZeRO-Offload" stands for a step that blocks, by the same figures of the machine:
the CPU steps float32 masters and moments after the backward pass, then the weights are copied back; its gradients are
taken to come for nothing.

    python benchmarks/offload_schedule.py --json
    python benchmarks/offload_schedule.py --cases "7B, 24 GB card" --tokens 4096 --chunk-mib 2
"""

from __future__ import annotations

import math
import multiprocessing
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import results
import shardopt
from results import Cell, Column
from shardopt.estimate.hiding import BACKWARD_FLOP, FORWARD_FLOP, Machine
from shardopt.state import residency
from stand_in_device import CPU, GPU, LANES, Device, Interval, stand_in

#: Stands where other benchmarks name the machine.
MODELLED = "modelled"
SHRINK = 16  # each dimension of a matrix, so that an element stands for its square
SCALE = SHRINK * SHRINK
CHUNK_BYTES = residency.CHUNK_BYTES // SCALE
STATE = 3 + 12 / 128  # bytes per parameter: two codes, the low byte of a 24-bit master, three scales per block
STEP_BYTES = 2 + 2 * (2 + STATE)  # a gradient is read; weight and state are read and written

#: Of DeepSpeedCPUAdam: gradient, master and moments are float32; and a bfloat16 weight is written.
ZERO_BYTES = 4 + 2 * 12 + 2
ZERO_CORE_NS = 0.45  # of shardopt's float32 kernel, in cache on a Sapphire Rapids (results/step_cpu_in_cache)


#: Figures that others have published of their own work on their own machines: not to be compared with a model's.
PUBLISHED = (
    "Published by its authors: SuperOffload (arXiv:2509.21271) has up to 2.5 times the throughput of earlier "
    "offloading on a GH200, and trains up to 25B on one; PyTorch's blog on it: use of the GPU went from about 50% to "
    "over 80%.",
    "Published by its authors: ZenFlow (arXiv:2505.12242) has over 85% less waiting of the GPU than ZeRO-Offload, and "
    "is up to 5 times as fast; DeepSpeed's blog on it: ZeRO-Offload makes steps of 0.5 s take over 7 s (Llama 2 7B, "
    "four A100).",
)


@dataclass(frozen=True)
class Decoder:
    """Shapes of a decoder."""

    width: int
    layers: int
    inner: int
    key_value: int
    vocabulary: int
    gated: bool = True

    def layer(self) -> list[tuple[int, int]]:
        """The matrices of a layer, in the order in which they are used."""
        d = self.width
        mlp = [(self.inner, d)] * (2 if self.gated else 1) + [(d, self.inner)]
        return [(d, d), (self.key_value, d), (self.key_value, d), (d, d), *mlp]


@dataclass(frozen=True)
class Case:
    """A model on a machine.

    Attributes:
        decoder: its shapes.
        machine: its speeds.
        ranks: GPUs that share the model's parameters, by rows, and the host.
    """

    decoder: Decoder
    machine: Machine
    ranks: int = 1


#: 80 and 445 TFLOP/s are half of an RTX 4090's 165 and 45% of an H100's 989. Links: 25 of PCIe 4's 32 GB/s, 50 of PCIe
#: 5's 63, 360 of NVLink-C2C's 450 each way. Hosts: two channels of DDR5-5600 (90 GB/s) and 16 cores of a Zen 4; eight
#: channels of DDR5-4800 per socket (307 GB/s), and 48 cores of one Sapphire Rapids, or 56 of each of two; a Grace (500
#: GB/s) with 72 cores; 72 to 75% of memory is reached. Nanoseconds per core are of results/step_cpu_in_cache. Grace was
#: not measured: its cores are taken to be as slow as a Zen 3's, 2.03, with 1.16 times that for masters as on a Zen 4.
#: Tokens are of whole sequences of 4096 with recomputed activations, as they fit beside the weights. FSDP2 gathers a
#: layer's weights while the one before is computed, so 70B waits a layer earlier than here.
CASES = {
    "7B, 24 GB card": Case(Decoder(4096, 32, 11008, 4096, 32000), Machine(80, 25, 65, 16, 1.11, 12288)),
    "8B, H100": Case(Decoder(4096, 32, 14336, 1024, 128256), Machine(445, 50, 230, 48, 1.35, 24576)),
    "70B, 8 H100": Case(Decoder(8192, 80, 28672, 1024, 128256), Machine(445, 50, 460, 112, 1.35, 16384), 8),
    "25B, GH200": Case(Decoder(6144, 54, 24576, 6144, 50257, gated=False), Machine(445, 360, 375, 72, 2.35, 16384)),
}


class Matrix(torch.autograd.Function):
    """The GPU's times of a matrix: a product forward, two backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, device: Device, seconds: float) -> Tensor:
        ctx.weight, ctx.device, ctx.seconds = weight, device, seconds
        device.compute(seconds, "forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.device.compute(ctx.seconds * BACKWARD_FLOP / FORWARD_FLOP, "backward")
        return gradient, ctx.device.gradient(ctx.weight), None, None


class Linear(nn.Module):
    """A matrix, of which this rank holds some rows."""

    def __init__(self, shape: tuple[int, int], device: Device, seconds: float, ranks: int) -> None:
        super().__init__()
        rows, columns = -(-shape[0] // SHRINK // ranks), shape[1] // SHRINK
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16))
        self._device, self._seconds = device, seconds

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Matrix.apply(x, self.weight, self._device, self._seconds)
        return found


class Layer(nn.Module):
    """A layer: shardopt waits for the steps of all its matrices when it is called."""

    def __init__(self, matrices: Iterable[Linear]) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(matrices)

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = matrix(x)
        return x


class Model(nn.Module):
    """A decoder, whose layers take the GPU's times."""

    def __init__(self, case: Case, device: Device) -> None:
        super().__init__()

        def linear(shape: tuple[int, int], *, flop: int = FORWARD_FLOP) -> Linear:
            return Linear(shape, device, case.machine.gpu_seconds(math.prod(shape), flop), case.ranks)

        decoder = case.decoder
        ends = (decoder.vocabulary, decoder.width)
        self.embedding = linear(ends, flop=0)  # rows are looked up
        self.layers = nn.ModuleList(Layer(map(linear, decoder.layer())) for _ in range(decoder.layers))
        self.head = linear(ends)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Found:
    """One step of a case, from the call of ``optimizer.step()`` to the next one.

    Attributes:
        seconds: of the step.
        numel: parameters of a rank.
        gradient_bytes: on the device at once, at most.
        intervals: all work.
    """

    seconds: float
    numel: int
    gradient_bytes: int
    intervals: tuple[Interval, ...]

    def busy(self, lane: str, name: str) -> float:
        """Seconds of one kind of work."""
        return sum(each.end - each.begin for each in self.intervals if (each.lane, each.name) == (lane, name))

    @property
    def gpu(self) -> float:
        """Seconds in which the GPU computes."""
        return self.busy(GPU, "forward") + self.busy(GPU, "backward")

    @property
    def waits_for_step(self) -> float:
        """Seconds in which the GPU waits before the first backward pass begins."""
        backward = min(each.begin for each in self.intervals if each.name == "backward")
        forward = [each for each in self.intervals if each.name == "forward" and each.begin < backward]
        return backward - sum(each.end - each.begin for each in forward)

    @property
    def waits_for_gradients(self) -> float:
        """Seconds in which the GPU waits otherwise."""
        return self.seconds - self.gpu - self.waits_for_step

    @property
    def hidden(self) -> float:
        """The share of the CPU's step in which the GPU does not wait for it."""
        return 1 - self.waits_for_step / self.busy(CPU, "step")


def train(
    case: Case, *, waiting: int = 8, micro_batches: int = 1, steps: int = 3, chunk_bytes: int = CHUNK_BYTES
) -> Found:
    """Trains for some steps, the last of which counts."""
    device = Device(case.machine, SCALE, STEP_BYTES + (2 if micro_batches > 1 else 0), case.ranks)
    with stand_in(device, chunk_bytes):
        model = Model(case, device)
        optimizer = shardopt.AdamW8bit(model.parameters(), master_weight_bits=24, offload="step", min_quantized_numel=0)
        release = shardopt.release_gradients(
            model, optimizer, overlap_forward=True, waiting_gradients=waiting, micro_batches=micro_batches
        )
        called: list[float] = []
        for _ in range(steps):
            for _ in range(micro_batches):
                model(torch.ones(1, requires_grad=True)).backward()
            shardopt.clip_grad_norm_(model.parameters(), 1.0, optimizer=optimizer)
            called.append(device.clock.now)
            optimizer.step()
        release.remove()
        numel = SCALE * sum(param.numel() for param in model.parameters())
    begin, end = called[-2:]
    inside = (each for each in device.intervals if begin <= each.begin < end)
    moved = tuple(replace(each, begin=each.begin - begin, end=each.end - begin) for each in inside)
    return Found(end - begin, numel, device.most_gradient_bytes, moved)


def tokens_that_hide(case: Case, share: float, **options: int) -> int | None:
    """Tokens, a multiple of 2048, from which on a share of the CPU's step hides; None if 32,768 are too few."""

    def hides(tokens: int) -> bool:
        machine = replace(case.machine, tokens=tokens)
        return train(replace(case, machine=machine), **options).hidden >= share

    steps = range(2048, 2**15 + 1, 2048)
    place = bisect_left(steps, True, key=hides)
    return steps[place] if place < len(steps) else None


def blocking_waits(case: Case, numel: int) -> float:
    """Seconds that the GPU waits for a step that blocks, and for the copy of the weights after it."""
    machine = replace(case.machine, core_ns=case.machine.core_ns * ZERO_CORE_NS / Machine().core_ns)
    stepped = numel * case.ranks
    return machine.step_seconds(stepped, stepped * ZERO_BYTES) + machine.link_seconds(2 * numel)


def merged(intervals: Sequence[Interval], gap: float) -> Iterator[Interval]:
    """Intervals of equal names on a lane as one where less than a gap is between them."""
    for lane in LANES:
        of_lane = sorted((each for each in intervals if each.lane == lane), key=lambda each: each.begin)
        run = of_lane[:1]
        for before, each in pairwise(of_lane):
            if each.name == before.name and each.begin - before.end < gap:
                continue
            yield replace(run[0], end=before.end)
            run = [each]
        if of_lane:
            yield replace(run[0], end=of_lane[-1].end)


def gradients_at_once(case: Case, count: int) -> int:
    """The most bytes of so many successive gradients of a rank."""
    model = Model(case, Device(case.machine, SCALE, STEP_BYTES, case.ranks))
    sizes = [2 * SCALE * param.numel() for param in model.parameters()]
    return max(sum(sizes[first : first + count]) for first in range(len(sizes)))


def report_timeline(where: Path | None, name: str, found: Found) -> None:
    """Prints what runs when, and writes it where ``--json`` says."""
    columns = [Column("place"), Column("lane"), Column("work"), Column("begin", "s", 3), Column("end", "s", 3)]
    merged_intervals = list(merged(found.intervals, found.seconds / 300))
    rows = [[str(i), each.lane, each.name, each.begin, each.end] for i, each in enumerate(merged_intervals)]
    title = f"A step of {name}: what runs when"
    results.report(where, "offload_timeline", title, columns, rows, device=MODELLED)


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tokens", type=int, help="of a micro-batch, per GPU, in place of each case's")
    parser.add_argument("--waiting", type=int, default=8, help="waiting_gradients")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--chunk-mib", type=float, default=residency.CHUNK_BYTES / 2**20, help="copied at a time")
    args = parser.parse_args()
    options = {
        "waiting": args.waiting,
        "micro_batches": args.micro_batches,
        "chunk_bytes": round(args.chunk_mib * 2**20 / SCALE),
    }
    cases = {name: CASES[name] for name in args.cases}
    if args.tokens:
        cases = {name: replace(case, machine=replace(case.machine, tokens=args.tokens)) for name, case in cases.items()}
    with ProcessPoolExecutor(len(cases), multiprocessing.get_context("spawn")) as pool:
        all_found = dict(zip(cases, pool.map(partial(train, **options), cases.values()), strict=True))
        enough = dict(
            zip(cases, pool.map(partial(tokens_that_hide, share=0.9, **options), cases.values()), strict=True)
        )
    rows: list[list[Cell]] = []
    goals = []
    for name, found in all_found.items():
        case, step = cases[name], found.busy(CPU, "step")
        waits, blocking = (found.waits_for_step, found.waits_for_gradients), blocking_waits(case, found.numel)
        gradients = found.gradient_bytes / found.numel
        rows.append(
            [name, case.machine.tokens, found.gpu, step, *waits, 100 * found.hidden, enough[name], 2 + gradients]
        )
        rows[-1] += [blocking, (found.gpu + blocking) / found.seconds]
        goals.append(results.at_least(f"{name}: hidden, of the CPU's step,", found.hidden, 0.9))
        allowed = 0.1 + gradients_at_once(case, args.waiting + 1) / found.numel
        goals.append(
            results.at_most(f"{name}: bytes per parameter on the device", 2 + gradients, round(2 + allowed, 3))
        )
    seconds = ("GPU computes", "CPU steps", "GPU waits for the step", "for gradients")
    columns = [Column(""), Column("tokens"), *(Column(heading, "s", 3) for heading in seconds)]
    columns += [Column("hidden", "%", 1), Column("90% from", "tokens"), Column("device", "bytes", 2)]
    columns += [Column("ZeRO-Offload: GPU waits", "s", 2), Column("its step over ours", digits=2)]
    notes = [
        f"AdamW8bit, bfloat16 with 24-bit masters, clipped, waiting_gradients={args.waiting}, "
        f"micro_batches={args.micro_batches}, chunks of {args.chunk_mib:g} MiB; tokens of a micro-batch per GPU.",
        *PUBLISHED,
    ]
    title = "Offloaded steps beside the next forward pass: a schedule, in times of a model"
    results.report(args.json, "offload_schedule", title, columns, rows, goals=goals, notes=notes, device=MODELLED)
    first = next(iter(all_found))
    report_timeline(args.json, first, all_found[first])


if __name__ == "__main__":
    main()
