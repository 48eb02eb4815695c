"""Time of one optimizer step on a GPU, side by side with other optimizers and with the device's copy bandwidth.

The contenders take turns (A B C A B C ...), so that a machine's changes of pace hit all alike; medians of device events
are reported. Each contender has its own copy of the parameters; all share one set of gradients. `host` is the time
until the call of step() returns. A contender whose package is not installed is left out, and standard error says so.

    python benchmarks/step_cuda.py --json
    pip install bitsandbytes flashoptim     # the peers
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import results as figures
import shardopt
from results import Cell, Column
from shardopt.kernels import dispatch_cuda
from step_cpu import SHAPES

Params = list[torch.nn.Parameter]


def bitsandbytes_adamw(params: Params) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, lr=1e-4)


def flashoptim_adamw(params: Params) -> torch.optim.Optimizer:
    from flashoptim import FlashAdamW

    return FlashAdamW(params, lr=1e-4)


def ours(**options: object) -> Callable[[Params], torch.optim.Optimizer]:
    return lambda params: shardopt.AdamW8bit(params, lr=1e-4, **options)


def general_kernels(params: Params) -> torch.optim.Optimizer:
    """Ours with the kernels that take any blocks, though these are aligned; makes its tables at once."""
    optimizer = shardopt.AdamW(params, lr=1e-4, codec="log8")
    dispatch_cuda.ALIGNED_KERNELS = False
    try:
        optimizer.step()
    finally:
        dispatch_cuda.ALIGNED_KERNELS = True
    return optimizer


@dataclass
class Contender:
    """An optimizer, the dtype of parameters and gradients, and the bytes that a step must move per parameter."""

    make: Callable[[Params], torch.optim.Optimizer]
    dtype: torch.dtype
    bytes: float


HEAD_START = 4_000_000  # cycles: about 2 ms
BF16, FP32 = torch.bfloat16, torch.float32
#: Parameter read and written, gradient read, two moments read and written; scales per block of 128.
CONTENDERS: dict[str, Contender] = {
    "shardopt log8": Contender(ours(codec="log8"), BF16, 10 + 24 / 128),
    "shardopt log8, general kernels": Contender(general_kernels, BF16, 10 + 24 / 128),
    "shardopt companded8": Contender(ours(codec="companded8"), BF16, 10 + 16 / 128),
    "shardopt dynamic8": Contender(ours(codec="dynamic8"), BF16, 10 + 16 / 128),
    "shardopt bf16": Contender(ours(codec="bf16"), BF16, 14),
    "shardopt log8, 24-bit master": Contender(ours(codec="log8", master_weight_bits=24), BF16, 12 + 24 / 128),
    "shardopt log8, stochastic": Contender(ours(codec="log8", stochastic_rounding=True), BF16, 10 + 24 / 128),
    "torch fused, bf16": Contender(lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), BF16, 14),
    "bitsandbytes AdamW8bit": Contender(bitsandbytes_adamw, BF16, 10 + 16 / 256),
    "flashoptim FlashAdamW": Contender(flashoptim_adamw, BF16, 12),
    "shardopt fp32, fp32 weights": Contender(ours(codec="fp32"), FP32, 28),
    "torch fused, fp32": Contender(lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), FP32, 28),
}


@dataclass
class Result:
    contender: str
    shapes: str
    numel: int
    ms: float  # median of the rounds, on the device
    fastest_ms: float
    host_us: float  # median until step() returned
    gb_per_s: float
    share_of_copy: float


def time_of(call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds on the device and microseconds on the host of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)  # the host queues the call's launches meanwhile, so that its time is not measured
    begin.record()
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host * 1e6


def numel_that_fits(names: list[str], free: int) -> int:
    """Hundreds of millions of parameters, 1,000 at most, for which all contenders fit into the free bytes.

    Each has weights and moments of its own; they share gradients, and one tensor in float32 while values are made.
    """
    contenders = [CONTENDERS[name] for name in names]
    weights_and_moments = sum(each.dtype.itemsize + (each.bytes - 3 * each.dtype.itemsize) / 2 for each in contenders)
    shared = sum(dtype.itemsize for dtype in {each.dtype for each in contenders}) + FP32.itemsize
    return min(int(0.9 * free / (weights_and_moments + shared) // 10**8), 10) * 10**8


def copy_bandwidth(rounds: int) -> float:
    """Bytes per second that a large copy on the device reads and writes."""
    source = torch.randn(2**30, device="cuda")  # zeros can be faster: memory is compressed
    target = torch.empty_like(source)
    times = [time_of(lambda: target.copy_(source))[0] for _ in range(rounds + 2)][2:]
    return 2 * source.numel() * 4 / (statistics.median(times) * 1e-3)


def measure(names: list[str], shapes: str, numel: int, rounds: int, bandwidth: float) -> list[Result]:
    """Medians over interleaved rounds, after three unmeasured ones."""
    torch.manual_seed(0)
    sizes = SHAPES[shapes](numel)
    total = sum(torch.Size(size).numel() for size in sizes)
    gradients = {
        dtype: [torch.randn(size, device="cuda").mul_(1e-3).to(dtype) for size in sizes]
        for dtype in {CONTENDERS[name].dtype for name in names}
    }
    steps: dict[str, Callable[[], object]] = {}
    for name in names:
        contender = CONTENDERS[name]
        params = [torch.nn.Parameter(torch.randn(size, device="cuda").to(contender.dtype)) for size in sizes]
        for param, gradient in zip(params, gradients[contender.dtype], strict=True):
            param.grad = gradient
        try:
            step = contender.make(params).step
            step()
            steps[name] = step
        except (ImportError, TypeError, RuntimeError) as error:
            print(f"left out {name}: {error}", file=sys.stderr)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for current in range(rounds + 2):
        for name, step in steps.items():
            measured = time_of(step)
            if current >= 2:
                times[name].append(measured)
    results = []
    for name, found in times.items():
        ms, host = (statistics.median(column) for column in zip(*found, strict=True))
        rate = CONTENDERS[name].bytes * total / (ms * 1e-3)
        fastest = min(found)[0]
        results.append(Result(name, shapes, total, ms, fastest, host, rate / 1e9, rate / bandwidth))
    return results


def main() -> None:
    parser = figures.parser(__doc__)
    parser.add_argument("--numel", type=int, help="parameters; default: 1e9, or as many as fit")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device that PyTorch can use")

    bandwidth = copy_bandwidth(args.rounds)
    torch.cuda.empty_cache()
    numel = args.numel or numel_that_fits(args.contenders, torch.cuda.mem_get_info()[0])
    if numel == 0:
        sys.exit("got too little free memory for 1e8 parameters of all contenders; name fewer, or give --numel")
    results: list[Result] = []
    for shapes in args.shapes:
        results += measure(args.contenders, shapes, numel, args.rounds, bandwidth)
        torch.cuda.empty_cache()
    columns = [Column(""), Column("median", "ms", 3), Column("fastest", "ms", 3), Column("traffic", "GB/s", 0)]
    columns += [Column("of a copy's", digits=2), Column("host", "us", 0)]
    rows: list[list[Cell]] = [
        [f"{r.contender}, {r.shapes}", r.ms, r.fastest_ms, r.gb_per_s, r.share_of_copy, r.host_us] for r in results
    ]
    numels = ", ".join(f"{shapes} {numel:,}" for shapes, numel in dict.fromkeys((r.shapes, r.numel) for r in results))
    notes = [f"Parameters: {numels}; medians of {args.rounds} rounds; a copy has {bandwidth / 1e9:.0f} GB/s."]
    name = torch.cuda.get_device_name()
    figures.report(args.json, "step_cuda", "One step on a GPU", columns, rows, notes=notes, device=name)


if __name__ == "__main__":
    main()
