"""Helpers of the tests on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from helpers import Named, step
from kernel_problem import make
from ranks.snapshot import Snapshot, snapshot
from shardopt import _C
from shardopt.optim import ShardedOptimizer

#: The device under test. Without a GPU, or a build for one, the CPU stands in for it, so that tests can be tried.
CPU, CUDA = torch.device("cpu"), torch.device("cuda" if torch.cuda.is_available() and _C.with_cuda else "cpu")
needs_gpu = pytest.mark.skipif(CUDA.type == "cpu", reason="needs a GPU's streams or memory, and a build with CUDA")


def synchronize() -> None:
    """Waits for the device under test."""
    if CUDA.type == "cuda":
        torch.cuda.synchronize()


def keep_busy(cycles: int) -> None:
    """Queues work that makes what follows late, on a GPU."""
    if CUDA.type == "cuda":
        torch.cuda._sleep(cycles)


def make_on(
    device: torch.device, rule: str, codec: str, initial: Named, **options: object
) -> tuple[Named, ShardedOptimizer]:
    """Parameters on a device with copies of these values, and their optimizer."""
    return make(rule, codec, {name: value.to(device) for name, value in initial.items()}, **options)


def step_on(optimizer: ShardedOptimizer, params: Named, gradients: Mapping[str, Tensor]) -> None:
    """A step with these gradients, moved to the parameters' device, and without warnings of skipped elements."""
    moved = {name: gradients[name].to(param.device) for name, param in params.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        step(optimizer, params, moved)


def snapshot_of(params: Named, optimizer: ShardedOptimizer) -> Snapshot:
    """Parameters and state, on the CPU."""
    return {name: value.cpu() for name, value in snapshot(params, optimizer).items()}


def run(
    device: torch.device, rule: str, codec: str, initial: Named, steps: list[Named], **options: object
) -> tuple[Snapshot, int]:
    """Parameters and state after these steps, and how many elements were skipped."""
    params, optimizer = make_on(device, rule, codec, initial, **options)
    for gradients in steps:
        step_on(optimizer, params, gradients)
    return snapshot_of(params, optimizer), optimizer.nonfinite_count
