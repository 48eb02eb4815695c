"""Time of one optimizer step on the CPU, side by side with other optimizers in one interleaved run.

The contenders take turns (A B C A B C ...), so that a machine's changes of pace hit all alike; medians are reported.
Each contender has its own copy of the parameters; all share one set of gradients. "roofline" is AdamW as a bare loop,
"memory" a bare loop that moves the bytes of log8's state (16.2 per parameter) or float32's (28) and hardly computes
(roofline.c): an optimizer at the time of its loop is bound by memory. A contender whose package or compiler is missing
is left out, and standard error says so.

    python benchmarks/step_cpu.py --shapes one transformer --threads 1 2 --json
    python benchmarks/step_cpu.py --all-cores           # from how many threads on memory binds log8
    python benchmarks/step_cpu.py --in-cache            # the kernels alone, in one thread
    python benchmarks/step_cpu.py --settings            # and of all codecs, block sizes and weight formats
    python benchmarks/step_cpu.py --dtype bfloat16 --threads 2
    python benchmarks/step_cpu.py --columns 4096 1000 448 257 130 64 33 --contenders "shardopt log8"
    pip install bitsandbytes torchao deepspeed ninja     # the peers
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import results as files
import shardopt
from measuring import in_turn
from results import ROOT, Cell, Column
from shardopt import _C
from shardopt.kernels.dispatch import CpuCall, cpu_target, use_cpu_target

Params = list[torch.nn.Parameter]


def one_tensor(numel: int) -> list[tuple[int, ...]]:
    return [(numel // 1024, 1024)]


def transformer(numel: int) -> list[tuple[int, ...]]:
    """The parameter shapes of a decoder of about that many parameters in 33 layers: some 300 tensors."""
    layers = 33
    width = max(64, int((numel / layers / 12) ** 0.5) // 64 * 64)
    layer = [(width, width)] * 4 + [(4 * width, width)] * 2 + [(width,)] * 2 + [(width, 1)]
    return [(1024, width), *layer * layers]


def small(numel: int) -> list[tuple[int, ...]]:
    """200 matrices of 64 x 64 and 100 vectors of 64, whatever the number asked for."""
    return [(64, 64)] * 200 + [(64,)] * 100


SHAPES = {"one": one_tensor, "transformer": transformer, "small": small}


def bitsandbytes_adamw(params: Params) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, lr=1e-4)


def torchao_adamw(params: Params) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=1e-4)


def deepspeed_adamw(params: Params) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, lr=1e-4, adamw_mode=True)


def ours(codec: str, **options: Any) -> Callable[[Params], torch.optim.Optimizer]:
    return lambda params: shardopt.AdamW(params, lr=1e-4, codec=codec, **options)


@functools.cache
def bare_loops() -> ctypes.CDLL:
    """The loops of roofline.c, compiled for this processor.

    Raises:
        ImportError: no compiler takes them.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "roofline.so"
        flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
        try:
            subprocess.run(["cc", *flags, str(ROOT / "benchmarks/roofline.c"), "-o", str(library)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ImportError(f"it does not compile: {error}") from error
        return ctypes.CDLL(str(library))


class BareLoop(torch.optim.Optimizer):
    """One of the loops of roofline.c over each parameter, its gradient and some state."""

    def __init__(self, params: Params, name: str) -> None:
        super().__init__(params, {})
        self._loop = getattr(bare_loops(), name)
        self._name = name
        self._state = [self._state_of(param) for param in params]
        self._steps = 0

    def _state_of(self, param: Tensor) -> list[Tensor]:
        if self._name != "move_8bit":
            return [torch.zeros_like(param), torch.zeros_like(param)]
        codes = [torch.zeros(param.numel(), dtype=torch.uint8) for _ in range(2)]
        return [*codes, torch.zeros(3 * (param.numel() // 128 + 1))]

    def step(self, closure: Any = None) -> None:
        self._steps += 1
        scalars = (1e-4, 0.9, 0.999, 1e-8, 1e-2, 1 - 0.9**self._steps, (1 - 0.999**self._steps) ** 0.5)
        for param, state in zip(self.param_groups[0]["params"], self._state, strict=True):
            tensors = [ctypes.c_void_p(t.data_ptr()) for t in (param, param.grad, *state)]
            numel = ctypes.c_ssize_t(param.numel())
            further = map(ctypes.c_float, scalars) if self._name == "adamw" else ()
            self._loop(*tensors, numel, torch.get_num_threads(), *further)


def bare_loop(name: str) -> Callable[[Params], torch.optim.Optimizer]:
    return lambda params: BareLoop(params, name)


CONTENDERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "shardopt log8": ours("log8"),
    "shardopt companded8": ours("companded8"),
    "shardopt dynamic8": ours("dynamic8"),
    "shardopt bf16": ours("bf16"),
    "shardopt fp32": ours("fp32"),
    "shardopt log8 + 24 bits": ours("log8", master_weight_bits=24),
    "memory, 16.2 bytes": bare_loop("move_8bit"),
    "memory, 28 bytes": bare_loop("move_float32"),
    "roofline": bare_loop("adamw"),
    "torch fused": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    "torch foreach": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
    "DeepSpeedCPUAdam": deepspeed_adamw,
    "bitsandbytes AdamW8bit": bitsandbytes_adamw,
    "torchao AdamW8bit": torchao_adamw,
}


#: Every setting that the documentation names: by codec and block size, then formats of the weights.
SETTINGS = {
    f"shardopt {codec}, blocks of {size}": ours(codec, block_size=size)
    for codec, sizes in (
        ("log8", (128, 16, 32, 64, 256, 512, 1024, 2048)),
        ("companded8", (32, 64, 128, 256)),
        ("dynamic8", (64, 128, 256)),
        ("log4", (128, 256)),
    )
    for size in sizes
} | {
    "shardopt log8, repaid": ours("log8", repay=True),
    "shardopt log4, repaid": ours("log4", repay=True),
    "shardopt log8, bf16": ours("log8"),
    "shardopt log8, bf16 + 8 bits": ours("log8", master_weight_bits=24),
    "shardopt log8, bf16 + 16 bits": ours("log8", master_weight_bits=32),
    "shardopt log8, bf16 at random": ours("log8", stochastic_rounding=True),
    "shardopt fp32, bf16 + 16 bits": ours("fp32", master_weight_bits=32),
}
CONTENDERS |= SETTINGS

#: Contenders that mean something for one dtype only.
DTYPES = {name: torch.bfloat16 if "bf16" in name else torch.float32 for name in SETTINGS} | {
    "shardopt log8 + 24 bits": torch.bfloat16,
    "roofline": torch.float32,
    "memory, 16.2 bytes": torch.float32,
    "memory, 28 bytes": torch.float32,
}


@dataclass
class Result:
    contender: str
    threads: int
    shapes: str
    numel: int
    ms: float  # median of the rounds
    fastest_ms: float

    @property
    def ns_per_parameter(self) -> float:
        return self.ms * 1e6 / self.numel


def step_of(contender: str, gradients: list[torch.Tensor]) -> Callable[[], object]:
    """The step of a contender on random parameters with these gradients."""
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(gradient.shape).to(gradient.dtype)) for gradient in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    return CONTENDERS[contender](params).step


def measure(
    contenders: list[str],
    shapes: dict[str, list[tuple[int, ...]]],
    threads: int,
    rounds: int,
    dtype: torch.dtype,
) -> list[Result]:
    """Each contender on each list of sizes, all in one interleaved run."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    gradients = {name: [torch.randn(size).mul_(1e-3).to(dtype) for size in sizes] for name, sizes in shapes.items()}
    steps: dict[str, Callable[[], object]] = {}
    cases: dict[str, tuple[str, str, int]] = {}
    for contender, name in product(contenders, shapes):
        if DTYPES.get(contender, dtype) != dtype:
            continue
        case = f"{contender}, {name}"
        try:
            steps[case] = step_of(contender, gradients[name])
        except ImportError as error:
            print(f"left out {contender}: {error}", file=sys.stderr)
            continue
        cases[case] = contender, name, sum(gradient.numel() for gradient in gradients[name])
    seconds = in_turn(steps, rounds).values()
    return [
        Result(contender, threads, name, numel, statistics.median(times) * 1e3, min(times) * 1e3)
        for (contender, name, numel), times in zip(cases.values(), seconds, strict=True)
    ]


def kernel_of(step: Callable[[], object]) -> Callable[[], object]:
    """The compiled part alone of the step of an optimizer of ours, which has taken no step."""
    calls: list[CpuCall] = []
    run = CpuCall.run
    try:
        CpuCall.run = lambda call, phase: calls.append(call)  # type: ignore[method-assign,assignment]
        step()
    finally:
        CpuCall.run = run  # type: ignore[method-assign]
    (call,) = calls

    def kernel(owner: object = step) -> None:  # the call has addresses of the optimizer's tensors
        call.run(_C.Phase.step)

    return kernel


def in_cache(contenders: list[str], columns: list[int], rounds: int, dtype: torch.dtype | None) -> list[Result]:
    """The kernels alone in one thread, on 32,768 elements, which stay in the second-level cache.

    `dtype` None: each contender on its own.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernels: dict[str, Callable[[], object]] = {}
    cases = {}
    for contender, length in product(contenders, columns):
        its_dtype = DTYPES.get(contender, dtype or torch.float32)
        if its_dtype == (dtype or its_dtype) and contender.startswith(("shardopt", "memory", "DeepSpeed")):
            gradient = torch.randn(2**15 // length, length).mul_(1e-3).to(its_dtype)
            step = step_of(contender, [gradient])
            kernels[f"{contender}, {length}"] = kernel_of(step) if contender.startswith("shardopt") else step
            cases[f"{contender}, {length}"] = contender, 1, f"rows of {length}", gradient.numel()
    seconds = in_turn(kernels, rounds, at_once=50)
    return [Result(*cases[case], statistics.median(s) * 1e3, min(s) * 1e3) for case, s in seconds.items()]


def print_bound(results: list[Result]) -> None:
    """From how many threads on log8 takes at most a tenth more than the bare loop over the same bytes."""
    of = {(result.contender, result.threads): result.ns_per_parameter for result in results}
    ratios = {threads: of[log8, threads] / of["memory, 16.2 bytes", threads] for log8, threads in of if "log8" in log8}
    print("\nall cores: log8's time over its memory's: " + ", ".join(f"{t} threads {r:.2f}" for t, r in ratios.items()))
    bound = [threads for threads in ratios if all(r <= 1.1 for t, r in ratios.items() if t >= threads)]
    print(f"memory binds log8 from {bound[0]} threads on" if bound else "memory does not bind log8 on this machine")


def part(args: argparse.Namespace) -> tuple[str, str]:
    """The name of the part of this benchmark that was run, and its title."""
    dtype = "" if args.dtype == "float32" else f"_{args.dtype}"
    if args.all_cores:
        return f"step_cpu_all_cores{dtype}", "One AdamW step on the CPU by number of threads"
    if args.settings:
        title = f"The kernels alone ({args.target}), by codec, block size and weight format: in cache, one thread"
        return f"step_cpu_settings_{args.target}", title
    if args.in_cache:
        if args.columns:
            return f"step_cpu_rows{dtype}", "The kernels alone by length of rows: in cache, one thread"
        return f"step_cpu_in_cache{dtype}", "The kernels alone: in cache, one thread"
    if args.columns:
        return f"step_cpu_columns{dtype}", "One AdamW step on the CPU by length of rows"
    shapes = "" if args.shapes == ["one"] else "_" + "_".join(args.shapes)
    peers = "_peers" if {"bitsandbytes AdamW8bit", "torchao AdamW8bit"} & set(args.contenders) else ""
    title = "One AdamW step on the CPU" + (" beside other packages in 8 bits" if peers else "")
    return f"step_cpu{peers}{shapes}{dtype}", title


def report(args: argparse.Namespace, results: list[Result]) -> None:
    """Prints the results, and writes them where ``--json`` says."""
    args.contenders = [name for name in args.contenders if any(r.contender == name for r in results)]
    several = len({r.threads for r in results}) > 1
    shapes = len({r.shapes for r in results}) > 1
    base = {(r.threads, r.shapes): r for r in results if r.contender == "DeepSpeedCPUAdam"}
    rows: list[list[Cell]] = []
    for r in results:
        name = r.contender + (f", {r.shapes}" if shapes else "") + (f", {r.threads} threads" if several else "")
        peer = base.get((r.threads, r.shapes))
        ns, first = r.ns_per_parameter, results[0].ns_per_parameter
        rows.append([name, r.ms, r.fastest_ms, files.ratio(peer and peer.ms, r.ms), ns, ns / first])
    columns = [Column(""), Column("median", "ms"), Column("fastest", "ms")]
    columns += [Column("DeepSpeedCPUAdam's time over it", digits=2), Column("ns per parameter", digits=3)]
    columns.append(Column("over the first's", digits=2))
    threads = None if several else results[0].threads
    numels = ", ".join(f"{numel:,}" for numel in dict.fromkeys(r.numel for r in results))
    dtype = "float32 or bfloat16" if args.settings else args.dtype
    notes = [f"{numels} parameters of {dtype}; {args.rounds} interleaved rounds."]
    if args.settings:
        notes.append("DeepSpeedCPUAdam's time has some 10 us of Python in it, the others' have none.")
    name, title = part(args)
    files.report(args.json, name, title, columns, rows, threads=threads, notes=notes)


def main() -> None:
    parser = files.parser(__doc__)
    parser.add_argument("--numel", type=int, default=64 * 2**20)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["one"])
    parser.add_argument("--columns", type=int, nargs="+", help="one tensor for each, with rows of so many elements")
    parser.add_argument("--transformer-numel", type=int, default=100_000_000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--in-cache", action="store_true", help="the kernels alone, in one thread, by --columns")
    parser.add_argument("--all-cores", action="store_true", help="log8, fp32 and memory in 1, 2, 4, ... all threads")
    parser.add_argument("--settings", action="store_true", help="the kernels alone, in one thread, of every setting")
    parser.add_argument("--target", choices=_C.cpu_targets(), default=cpu_target(), help="instruction set of ours")
    args = parser.parse_args()
    if args.settings:
        args.contenders = [*SETTINGS, "shardopt fp32", "shardopt bf16", "memory, 16.2 bytes", "DeepSpeedCPUAdam"]
    if args.all_cores:
        cores = len(os.sched_getaffinity(0))
        args.threads = sorted({*(2**k for k in range(cores.bit_length())), cores})
        args.contenders = ["shardopt log8", "shardopt fp32", "memory, 16.2 bytes", "memory, 28 bytes"]

    dtype = getattr(torch, args.dtype)
    if args.columns:
        runs = [{f"rows of {columns}": [(args.numel // columns, columns)] for columns in args.columns}]
    else:
        numels = {"transformer": args.transformer_numel}
        runs = [{name: SHAPES[name](numels.get(name, args.numel))} for name in args.shapes]
    results: list[Result] = []
    with use_cpu_target(args.target):
        if args.in_cache or args.settings:
            results = in_cache(args.contenders, args.columns or [2048], args.rounds, None if args.settings else dtype)
        else:
            for shapes, threads in product(runs, args.threads):
                results += measure(args.contenders, shapes, threads, args.rounds, dtype)
    report(args, results)
    if args.all_cores:
        print_bound(results)


if __name__ == "__main__":
    main()
