"""Races of a step on a GPU with other optimizers, with the device's copies and with its norms.

Contenders take turns; medians of device events are reported, and the time until the call returns. Each race is a part
of its own: one that fails does not stop others.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import shardopt
from gpu.common import DEVICE, FAKE, Left, Report, synchronize
from step_cpu import one_tensor as one
from step_cpu import small, transformer


@dataclass
class Contender:
    """An optimizer, the dtype of parameters and gradients, and the bytes that a step must move per parameter."""

    make: Callable[[list[Any]], Any]
    dtype: str
    bytes: float


def ours(**options: Any) -> Callable[[list[Any]], Any]:
    return lambda params: shardopt.AdamW8bit(params, lr=1e-4, **options)


def from_package(package: str, name: str, **options: Any) -> Callable[[list[Any]], Any]:
    return lambda params: getattr(importlib.import_module(package), name)(params, lr=1e-4, **options)


def torch_adamw(params: list[Any]) -> Any:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


LOG8, OTHER8 = 24 / 128, 16 / 128  # bytes of scales that a step moves
CONTENDERS = {
    "log8 bf16": Contender(ours(codec="log8"), "bfloat16", 10 + LOG8),
    "companded8 bf16": Contender(ours(codec="companded8"), "bfloat16", 10 + OTHER8),
    "torch fused bf16": Contender(torch_adamw, "bfloat16", 14),
    "flashoptim bf16+8": Contender(from_package("flashoptim", "FlashAdamW"), "bfloat16", 12),
    "log8 bf16+8": Contender(ours(codec="log8", master_weight_bits=24), "bfloat16", 12 + LOG8),
    "log8 fp32": Contender(ours(codec="log8"), "float32", 16 + LOG8),
    "companded8 fp32": Contender(ours(codec="companded8"), "float32", 16 + OTHER8),
    "fp32 fp32": Contender(ours(codec="fp32"), "float32", 28),
    "torch fused fp32": Contender(torch_adamw, "float32", 28),
    "dynamic8 bf16": Contender(ours(codec="dynamic8"), "bfloat16", 10 + OTHER8),
    "bf16 bf16": Contender(ours(codec="bf16"), "bfloat16", 14),
    "log8 stochastic": Contender(ours(codec="log8", stochastic_rounding=True), "bfloat16", 10 + LOG8),
    "lion log8 bf16": Contender(lambda p: shardopt.Lion8bit(p, lr=1e-4), "bfloat16", 8 + 8 / 128),
    "nadam log8 bf16": Contender(  # has no kernels of its own
        lambda p: shardopt.NAdam8bit(p, lr=1e-4), "bfloat16", 10 + LOG8
    ),
    "bitsandbytes bf16": Contender(from_package("bitsandbytes.optim", "AdamW8bit"), "bfloat16", 10 + 16 / 256),
    "torchao bf16": Contender(from_package("torchao.optim", "AdamW8bit"), "bfloat16", 10 + 16 / 256),
}


def rows(columns: int) -> Callable[[int], list[tuple[int, ...]]]:
    return lambda numel: [(numel // columns, columns)]


BIG = 400_000 if FAKE else 1_000_000_000
HALF = "half of the rows never have a gradient"
NORMS = ("shardopt norm", "torch norm")
#: Races: name, shapes, elements, contenders.
Race = tuple[str, Callable[[int], list[tuple[int, ...]]], int, tuple[str, ...]]
FIRST: tuple[Race, ...] = (
    ("one", one, BIG, ("log8 bf16", "companded8 bf16", "torch fused bf16", "flashoptim bf16+8", "log8 bf16+8")),
    ("one", one, BIG, ("log8 fp32", "companded8 fp32", "fp32 fp32", "torch fused fp32")),
)
OTHERS: tuple[Race, ...] = (
    ("transformer", transformer, BIG, ("log8 bf16", "torch fused bf16", "flashoptim bf16+8", "log8 bf16+8")),
    ("one", one, BIG, ("dynamic8 bf16", "bf16 bf16", "log8 stochastic")),
    ("small", small, 0, ("log8 bf16", "torch fused bf16", "flashoptim bf16+8")),
    ("one", one, BIG // 4, ("lion log8 bf16", "nadam log8 bf16")),
    ("rows of 130", rows(130), BIG // 4, ("log8 bf16",)),
    ("rows of 257", rows(257), BIG // 4, ("log8 bf16",)),
    ("rows of 33", rows(33), BIG // 4, ("log8 bf16",)),
    ("rows of 1000", rows(1000), BIG // 4, ("log8 bf16",)),
    (HALF, one, BIG // 4, ("log8 bf16", "companded8 bf16")),
    ("norm", transformer, BIG // 4, NORMS),
    ("1e8", one, BIG // 10, ("log8 bf16", "log8 fp32", "torch fused bf16", "torch fused fp32")),
    ("1e7", one, BIG // 100, ("log8 bf16", "log8 fp32", "torch fused bf16", "torch fused fp32")),
    ("1e6", one, BIG // 1000, ("log8 bf16", "log8 fp32", "torch fused bf16", "torch fused fp32")),
    ("peers, one", one, BIG // 2, ("log8 bf16", "bitsandbytes bf16")),
    ("peers, one", one, BIG // 8, ("log8 bf16", "torchao bf16")),  # compiles for some 20 s
)


def time_of(call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds on the device and microseconds on the host of one call."""
    if FAKE:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3, (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)  # some 2 ms, while the host queues the call's launches
    begin.record()
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host * 1e6


def bandwidths(report: Report) -> dict[str, float]:
    """GB/s of a copy, and of mixtures of reads and writes as a step has."""
    numel = 2**18 if FAKE else 2**30
    a = torch.randn(numel, device=DEVICE)
    b, c = torch.empty_like(a), torch.randn(numel, device=DEVICE)
    acts: dict[str, tuple[Callable[[], object], float]] = {
        "copy (1 read, 1 write)": (lambda: b.copy_(a), 2),
        "add (2 reads, 1 write)": (lambda: torch.add(a, c, out=b), 3),
        "read (sum)": (lambda: a.sum(), 1),
        "write (fill)": (lambda: b.fill_(1.0), 1),
    }
    found: dict[str, float] = {}
    for name, (act, streams) in acts.items():
        times = [time_of(act)[0] for _ in range(12)][2:]
        found[name] = round(streams * 4 * numel / statistics.median(times) / 1e6, 1)
    report.put("GB/s", found)
    return found


def races(report: Report, left: Left, part: int, parts: int) -> None:
    """The first races: log8, companded8 and float32 beside torch and flashoptim."""
    run(report, left, FIRST)


def others(report: Report, left: Left, part: int, parts: int) -> None:
    """Other shapes, codecs, rules and peers; norms; kernels by the profiler."""
    run(report, left, OTHERS)
    report.attempt("kernels", left, 4, partial(kernels, report))


def run(report: Report, left: Left, chosen: tuple[Race, ...]) -> None:
    """Runs races as long as there is time, beside the bandwidth as the first of these sections has found it."""
    found = report.found.get("GB/s") or report.of("races").get("GB/s") or bandwidths(report)
    for name, shapes, numel, names in chosen:
        title = f"{name}: {', '.join(names)}"
        field = Field(report, left, title, shapes(numel), found["copy (1 read, 1 write)"])
        act = field.race_norms if names == NORMS else partial(field.race_steps, names)
        report.attempt(title, left, 30 if "torchao bf16" in names else 6, act)
        del field, act
        gc.collect()
        if not FAKE:
            torch.cuda.empty_cache()


def values(shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).mul_(scale).to(dtype)


def parameters(sizes: list[tuple[int, ...]], dtype: Any, grads: list[Any] | None = None) -> list[Any]:
    """Parameters with gradients, of their own where none are given."""
    params = [torch.nn.Parameter(values(size, dtype)) for size in sizes]
    for param, grad in zip(params, grads or [values(size, dtype, 1e-3) for size in sizes], strict=True):
        param.grad = grad
    return params


class Field:
    """A race: shapes, the bandwidth of a copy in GB/s, and what is found about each contender."""

    def __init__(self, report: Report, left: Left, title: str, sizes: list[tuple[int, ...]], bandwidth: float) -> None:
        self._report, self._left, self._title, self._sizes, self._bandwidth = report, left, title, sizes, bandwidth
        self._total = sum(torch.Size(size).numel() for size in sizes)
        self._results: dict[str, Any] = {"parameters": self._total}
        torch.manual_seed(0)

    def race_steps(self, names: tuple[str, ...]) -> None:
        """Steps of optimizers on equal gradients; a peer that does not load is left out."""
        grads: dict[str, list[Any]] = {}
        steps: dict[str, tuple[Callable[[], object], float]] = {}
        for name in names:
            contender = CONTENDERS[name]
            dtype = getattr(torch, contender.dtype)
            if contender.dtype not in grads:
                grads[contender.dtype] = [values(size, dtype, 1e-3) for size in self._sizes]
                if HALF in self._title:  # an embedding, early: whole turns have codes of zero
                    for grad in grads[contender.dtype]:
                        grad[::2].zero_()
            try:
                optimizer = contender.make(parameters(self._sizes, dtype, grads[contender.dtype]))
                began = time.perf_counter()
                for _ in range(3):
                    optimizer.step()
                synchronize()
                self._results[f"{name}: first three steps, s"] = round(time.perf_counter() - began, 2)
                steps[name] = (optimizer.step, contender.bytes)
            except (ImportError, OSError, TypeError, RuntimeError, AttributeError) as error:
                self._results[name] = f"left out: {type(error).__name__}: {str(error)[:200]}"
            self._report.put(self._title, self._results)
        self._take_turns(steps)

    def race_norms(self) -> None:
        """Norms of bfloat16 gradients, which are not clipped."""
        params = parameters(self._sizes, torch.bfloat16)
        clips = (shardopt.clip_grad_norm_, torch.nn.utils.clip_grad_norm_)
        self._take_turns({name: (partial(clip, params, 1e9), 2) for name, clip in zip(NORMS, clips, strict=True)})

    def _take_turns(self, acts: dict[str, tuple[Callable[[], object], float]]) -> None:
        """Medians of acts, each with its bytes per parameter, written every few rounds."""
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in acts}
        began = time.monotonic()
        for current in range(4 if FAKE else 20):
            for name, (act, _) in acts.items():
                times[name].append(time_of(act))
            if current % 4 < 3:
                continue
            for name, found in times.items():
                ms, host = (statistics.median(column) for column in zip(*found, strict=True))
                rate = acts[name][1] * self._total / ms / 1e6
                self._results[name] = {
                    "ms": round(ms, 4), "fastest": round(min(found)[0], 4), "host us": round(host, 1),
                    "GB/s": round(rate, 1), "of copy": round(rate / self._bandwidth, 3), "rounds": len(found),
                }  # fmt: skip
            self._report.put(self._title, self._results)
            if self._left() < 4 or time.monotonic() - began > 8:
                break


def kernels(report: Report) -> None:
    """The kernels of a step of 300 tensors, and how long each takes on the device."""
    if FAKE:
        return
    from torch.profiler import ProfilerActivity, profile

    for title, sizes in (("transformer", transformer(10**8)), ("small", small(0))):
        optimizer = ours(codec="log8")(parameters(sizes, torch.bfloat16))
        for _ in range(3):
            optimizer.step()
        synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(3):
                optimizer.step()
            synchronize()
        found = [
            {"name": e.key[:90], "calls": e.count, "us": round(e.device_time_total / max(e.count, 1), 2)}
            for e in profiled.key_averages()
        ]
        report.put(f"kernels of a step, {title}", sorted(found, key=lambda e: -e["us"])[:8])
