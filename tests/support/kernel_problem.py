"""Problem of the kernel tests: parameters of sizes near a block's and a vector's, gradients with bad elements."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

import shardopt
from helpers import CASES, Named, ReferenceOptimizer, Shape, at_odd_offset, parameters, step
from ranks.layouts import values
from ranks.snapshot import Snapshot, assert_same, snapshot
from shardopt import _C, clip_grad_norm_
from shardopt.kernels import dispatch
from shardopt.optim import ShardedOptimizer
from weight_formats import BF16, FP16, FP32

CPU = torch.device("cpu")
#: Dtypes of parameter and gradient.
DTYPES = {
    "fp32": (FP32, FP32),
    "bf16": (BF16, BF16),
    "fp16": (FP16, FP16),
    "bf16-fp32": (BF16, FP32),
    "fp16-fp32": (FP16, FP32),
    "fp32-bf16": (FP32, BF16),
    "bf16-fp16": (BF16, FP16),
}
#: Nothing, single elements, and sizes on both sides of a block and of a vector; dim 0 is the row.
SHAPES: tuple[Shape, ...] = (
    *((), (0,), (0, 64), (1,), (31,), (257,)),
    *((3, 31), (5, 32), (4, 33), (1, 127), (1, 128), (2, 129), (3, 130), (2, 257), (4, 5, 7, 3)),
    *((3, 144), (5, 192)),  # last blocks that are short, but whole vectors
)
#: For tests of values rather than of sizes.
FEW_SHAPES: tuple[Shape, ...] = ((), (31,), (257,), (3, 130), (2, 257), (4, 5, 7, 3))
#: By their places in a gradient.
BAD = {0: torch.nan, 1: torch.inf, 40: -torch.inf, 129: torch.nan}
#: Overflowing a second moment, a sum, or nothing yet.
HUGE = {0: 1e19, 2: 3e38, 40: -1e21, 129: -3e38, 130: 9.2e18}
STEPS = 4
TARGETS = _C.cpu_targets()
#: Instruction sets and thread counts.
VARIANTS = list(product(TARGETS, (1, 2)))


@contextmanager
def using(target: str, threads: int) -> Iterator[None]:
    """Steps with this instruction set and this many threads, and without the warnings about skipped elements."""
    saved = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with dispatch.use_cpu_target(target), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        torch.set_num_threads(saved)


@lru_cache(maxsize=8)
def start(dtype: torch.dtype, shapes: tuple[Shape, ...] = SHAPES) -> Named:
    return {str(shape): values(shape, seed, dtype) for seed, shape in enumerate(shapes)}


@lru_cache(maxsize=64)
def gradients(t: int, dtype: torch.dtype, shapes: tuple[Shape, ...] = SHAPES, scale: float = 1e-2) -> Named:
    """Gradients of step ``t``; some of the third step's are NaN or Inf."""
    found = {str(shape): (values(shape, 100 * t + i) * scale).to(dtype) for i, shape in enumerate(shapes)}
    if t == 3:
        for gradient in found.values():
            for at, bad in BAD.items():
                if at < gradient.numel():
                    gradient.view(-1)[at] = bad
    return found


def make(rule: str, codec: str, initial: Named, **options: object) -> tuple[Named, ShardedOptimizer]:
    params = parameters(initial)
    options = {"min_quantized_numel": 0, **options}
    return params, CASES[rule].make(list(params.values()), codec=codec, **options)


def run(
    rule: str, codec: str, initial: Named, steps: list[Named], device: torch.device = CPU, **options: object
) -> tuple[Snapshot, int]:
    """Parameters and state after steps on a device, and how many elements were skipped."""
    params, optimizer = make(rule, codec, {name: value.to(device) for name, value in initial.items()}, **options)
    with using("portable", threads=1):
        for gradient in steps:
            step(optimizer, params, gradient)
    return snapshot(params, optimizer), optimizer.nonfinite_count


def compare(
    rule: str,
    codec: str,
    initial: Named,
    steps: list[Named],
    variants: list[tuple[str, int]] = VARIANTS,
    **options: object,
) -> list[tuple[Named, ShardedOptimizer]]:
    """Demands the reference's bits after each step of every variant; returns what was stepped."""
    oracle = ReferenceOptimizer(*make(rule, codec, initial, **options))
    stepped = [make(rule, codec, initial, **options) for _ in variants]
    for gradient in steps:
        oracle.step(gradient)
        for (params, optimizer), variant in zip(stepped, variants, strict=True):
            with using(*variant):
                step(optimizer, params, gradient)
            assert_same(snapshot(params, optimizer), oracle.snapshot())
    assert {optimizer.nonfinite_count for _, optimizer in stepped} == {oracle.nonfinite}
    return stepped


def clipped(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Norms, clipped gradients, and parameters and moments after a step that clips."""
    found = []
    for late in (False, True):
        params = [torch.nn.Parameter(torch.ones_like(gradient)) for gradient in gradients]
        optimizer = shardopt.SGD8bit(params, lr=0.5, momentum=0.9)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = at_odd_offset(gradient) if gradient.storage_offset() else gradient.clone()
        found += [clip_grad_norm_(params, 0.5, kind, optimizer=optimizer if late else None) for kind in (math.inf, 2.0)]
        if late:
            optimizer.step()
        found += [param.detach() if late else param.grad for param in params]
    return found
