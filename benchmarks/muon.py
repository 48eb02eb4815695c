"""Muon on shards: whose bits, how much the ranks send, how long a step takes, how much memory, and how exact it is.

    python benchmarks/muon.py bits traffic memory direction gram
    python benchmarks/muon.py time --rounds 7 --width 128 --layers 2

Each part prints a table; the ranks are processes that this one starts, with gloo.

bits: whether the weights after some steps of Muon8bit on a small model of odd sizes, in several waves, are those of the
unsharded run, to the bit, on all ranks. The gradient of an element is the same in every way of sharding.
traffic: the collectives that one step issues under FSDP2, and what they send from one rank to others, at most. Matrix
products are left out, because sizes alone decide what is sent. With gloo, PyTorch replaces all-to-alls of DTensors
by all-gathers.
time: medians of the slowest rank's time, one thread per rank; then of one process. Optimizers take turns.
memory: of two steps, what living storages of tensors take beside the optimizer's state, at most and afterwards; as seen
by PyTorch's dispatcher, that is without what a single operation of PyTorch takes and gives back.
direction: relative errors (Frobenius norm) of directions, orthogonalized in float32. They come from the momentum of
random gradients, coded in every step; those of shardopt's codecs from its kernels, in bfloat16 as the optimizer has
them: the line of fp32 shows what that alone does. The last line orthogonalizes the exact direction in bfloat16.
gram: the Gram form of Newton-Schulz beside the plain one: multiplications, time (medians, in turn), and errors against
float64 of random matrices and of steep ones, whose singular values fall evenly on a log scale to 1e-4.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import shardopt
from decoder import Architecture, Decoder
from muon_ranks import WAYS, Collectives, Live, Wrap, among_ranks, fsdp2, on_ranks, set_gradients, whole
from results import commit, machine
from shardopt.kernels.newton_schulz import QUINTIC, NewtonSchulz
from shardopt.state.options import bytes_of

ODD = Architecture(1, 130, 350, 65, 97, modern=True)
ODD_WAVES: dict[str, Any] = {"orthogonalize_memory": "768KiB", "min_quantized_numel": 64}
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
            optimizer = ZeroRedundancyOptimizer(groups, shardopt.Muon8bit, **ODD_WAVES)
        else:
            optimizer = shardopt.Muon8bit(groups, **ODD_WAVES)
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


def print_bits() -> None:
    torch.set_num_threads(1)
    expected, torchs = run("plain", lambda model: model), run(TORCHS, lambda model: model)
    start = dict(make(ODD).named_parameters())
    assert not any(torch.equal(expected[name], start[name]) for name in expected), "a parameter did not move"
    worlds = (1, 2, 3, 4)
    found = {ranks: on_ranks(ranks, compare, expected, torchs) for ranks in worlds}
    print(f"the bits of the unsharded run, after {STEPS} steps of Muon8bit (log8), {ODD}")
    print(f"{'ranks':30}" + "".join(f"{ranks:>10}" for ranks in worlds))
    for way in WAYS:
        answers = ({True: "yes", False: "NO", None: "-"}[found[ranks][0].get(way)] for ranks in worlds)
        print(f"{way:30}" + "".join(f"{answer:>10}" for answer in answers))
    print(f"{TORCHS + ', FSDP2, differs':30}" + "".join(f"{found[ranks][1]:10.2%}" for ranks in worlds))
    print("differs: from its own unsharded run, the most of any matrix, share of the way that the matrix moved")


# traffic


def contenders(**options: Any) -> dict[str, Callable[[list[Tensor]], Optimizer]]:
    return {
        "shardopt.Muon8bit": lambda params: shardopt.Muon8bit(params, **options),
        "shardopt.Muon fp32": lambda params: shardopt.Muon(params, **options),
        TORCHS: lambda params: torch.optim.Muon(params),
    }


def count() -> dict[str, list[float]]:
    """Bytes and collectives of a step, by optimizer, the greatest of any rank."""
    makers = {f"{name}, 512MiB": maker for name, maker in contenders().items() if name == "shardopt.Muon8bit"}
    makers["shardopt.Muon8bit, 24MiB"] = contenders(orthogonalize_memory="24MiB")["shardopt.Muon8bit"]
    makers[TORCHS] = contenders()[TORCHS]
    found = {}
    for name, maker in makers.items():
        params = matrices(fsdp2(make(REALISTIC)))
        optimizer = maker(params)
        set_gradients(params, [param.detach() for param in params])
        with Collectives():
            optimizer.step()
        with Collectives() as collectives:
            optimizer.step()
        found[name] = among_ranks([collectives.sent, collectives.calls])
    return found


def print_traffic() -> None:
    shapes = [tuple(param.shape) for param in matrices(make(REALISTIC))]
    numel = sum(rows * cols for rows, cols in shapes)
    print(f"what a step sends under FSDP2, at most from any rank; N = {numel:,} in {len(shapes)} matrices, {REALISTIC}")
    print(f"{'ranks':>5} {'':26}{'bytes':>14}{'bytes / N':>11}{'of 4 N / R':>12}{'collectives':>13}{'per matrix':>12}")
    for ranks in (2, 4):
        for name, (sent, calls) in on_ranks(ranks, count).items():
            print(
                f"{ranks:5} {name:26}{sent:14,.0f}{sent / numel:11.3f}{sent * ranks / (4 * numel):12.3f}"
                f"{calls:13.0f}{calls / len(shapes):12.2f}"
            )


# time


def measure(architecture: Architecture, rounds: int, ranks: int) -> dict[str, float]:
    """Median seconds of a step by optimizer, after one unmeasured round."""
    steps: dict[str, Callable[[], Any]] = {}
    for name, maker in contenders().items():
        model = make(architecture)
        params = matrices(fsdp2(model) if ranks else model)
        set_gradients(params, [param.detach() for param in params])
        steps[name] = maker(params).step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            if ranks:
                dist.barrier()
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    medians = {}
    for name, of_name in seconds.items():
        medians[name] = statistics.median((among_ranks(of_name) if ranks else of_name)[1:])
    return medians


def print_time(architecture: Architecture, rounds: int) -> None:
    print(f"ms per step of the matrices, medians of {rounds} rounds, and to torch.optim.Muon's; {architecture}")
    print(f"{'':34}" + "".join(f"{name:>28}" for name in contenders()))
    found = {
        f"FSDP2, {ranks} ranks of one thread": on_ranks(ranks, measure, architecture, rounds, ranks) for ranks in (2, 4)
    }
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found[f"one process, {threads} thread{'s' * (threads > 1)}"] = measure(architecture, rounds, 0)
    for case, medians in found.items():
        cells = (f"{taken * 1e3:20.1f} ({taken / medians[TORCHS]:5.2f})" for taken in medians.values())
        print(f"{case:34}" + "".join(cells))


# memory


def peaks(architecture: Architecture, budgets: list[str], ranks: int) -> list[float]:
    """Of each budget the peak of two steps and what is left after them, beside the state: the most of any rank."""
    found = []
    for budget in budgets:
        model = make(architecture)
        params = matrices(fsdp2(model) if ranks else model)
        set_gradients(params, [param.detach() for param in params])
        optimizer = shardopt.Muon8bit(params, orthogonalize_memory=budget)
        with Live() as live:
            optimizer.step()
            optimizer.step()
        state = state_bytes(optimizer)
        found += [float(live.peak - state), float(live.taken - state)]
    return among_ranks(found) if ranks else found


def state_bytes(optimizer: Optimizer) -> int:
    """On this rank."""
    tensors = (x for state in optimizer.state.values() for x in state.values())
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


def print_memory(architecture: Architecture) -> None:
    budgets = ["512KiB", "768KiB", "1MiB", "2MiB", "512MiB"]
    shapes = [tuple(param.shape) for param in matrices(make(architecture))]
    numel = sum(rows * cols for rows, cols in shapes)
    least = max(2 * rows * cols + NewtonSchulz.workspace(rows, cols, "cpu") for rows, cols in shapes)
    print(f"bytes beside the state, by orthogonalize_memory; {architecture}")
    print(f"directions of all matrices {2 * numel:,}; direction and workspace of the largest one {least:,}")
    print(f"{'':34}" + "".join(f"{budget:>13}" for budget in budgets))
    print(f"{'orthogonalize_memory':34}" + "".join(f"{bytes_of(budget):13,}" for budget in budgets))
    found = {"one process": peaks(architecture, budgets, 0)}
    found["FSDP2, 2 ranks, the most"] = on_ranks(2, peaks, architecture, budgets, 2)
    for case, numbers in found.items():
        print(f"{case + ', peak':34}" + "".join(f"{number:13,.0f}" for number in numbers[::2]))
        print(f"{case + ', kept':34}" + "".join(f"{number:13,.0f}" for number in numbers[1::2]))
    for codec in ("log8", "companded8", "dynamic8", "fp32"):
        params = matrices(make(architecture))
        set_gradients(params, [param.detach() for param in params])
        optimizer = shardopt.Muon(params, codec=codec, ns_steps=1)
        optimizer.step()
        print(f"bytes of state per parameter of a matrix, {codec:12}{state_bytes(optimizer) / numel:8.4f}")


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


def print_direction() -> None:
    by_spectrum = [errors(spectrum) for spectrum in SPECTRA]
    print(f"relative error of the orthogonalized direction, {SIDE} x {SIDE}, {MOMENTS} steps, by singular values")
    print(f"{'':30}" + "".join(f"{spectrum:>14}" for spectrum in SPECTRA))
    for name in by_spectrum[0]:
        print(f"{name:30}" + "".join(f"{of_one[name]:14.4f}" for of_one in by_spectrum))


# gram

SHAPES = ((512, 512), (512, 1024), (512, 1408), (512, 2560), (512, 4096))


def of_spectrum(rows: int, cols: int, decades: float | None) -> Tensor:
    """A matrix whose singular values fall by so many decades, or a random one."""
    generator = torch.Generator().manual_seed(0)
    if decades is None:
        return torch.randn(rows, cols, generator=generator)
    left, right = (torch.linalg.qr(torch.randn(n, rows, generator=generator))[0] for n in (rows, cols))
    return left * torch.logspace(0, -decades, rows) @ right.T


def in_float64(newton_schulz: NewtonSchulz, matrix: Tensor) -> Tensor:
    return newton_schulz(matrix.div_(matrix.norm()).double(), in_float32=False)


def print_gram(rounds: int) -> None:
    forms = [NewtonSchulz((QUINTIC,) * 5, 1e-7, gram) for gram in (False, True)]
    print(f"5 steps; of the plain form's multiplications and time ({torch.get_num_threads()} threads); relative errors")
    print(f"{'':14}{'multiplications':>16}{'time':>7}{'random: plain':>15}{'gram':>8}{'steep: plain':>14}{'gram':>8}")
    for rows, cols in SHAPES:
        plain, gram = (form.flops(rows, cols) for form in forms)
        found: list[float] = []
        for decades in (None, 4.0):
            matrix = of_spectrum(rows, cols, decades).bfloat16()
            expected = in_float64(forms[0], matrix.clone())
            found += [float((form(matrix.clone()) - expected).norm() / expected.norm()) for form in forms]
        seconds: list[list[float]] = [[], []]
        for _ in range(rounds):
            for form, taken in zip(forms, seconds, strict=True):
                copy = matrix.clone()
                start = time.perf_counter()
                form(copy)
                taken.append(time.perf_counter() - start)
        ratio = statistics.median(seconds[1]) / statistics.median(seconds[0])
        errors = f"{found[0]:15.4f}{found[1]:8.4f}{found[2]:14.4f}{found[3]:8.4f}"
        print(f"{rows} x {cols:<8}{gram / plain:16.2f}{ratio:7.2f}{errors}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["bits", "traffic", "time", "memory", "direction", "gram"])
    parser.add_argument("--rounds", type=int, default=7, help="of time and gram")
    parser.add_argument("--width", type=int, default=128, help="of the model in time and memory")
    parser.add_argument("--layers", type=int, default=2, help="of the model in time and memory")
    args = parser.parse_args()
    architecture = small(args.width, args.layers)
    parts: dict[str, Callable[[], None]] = {
        "bits": print_bits,
        "traffic": print_traffic,
        "time": lambda: print_time(architecture, args.rounds),
        "memory": lambda: print_memory(architecture),
        "direction": print_direction,
        "gram": lambda: print_gram(args.rounds),
    }
    print(f"{machine()}, commit {commit()}")
    for part in args.parts:
        print(f"\n{part}: ", end="", flush=True)
        parts[part]()


if __name__ == "__main__":
    main()
