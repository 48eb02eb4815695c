"""Steps on a GPU: no one waits, and streams, CUDA graphs, loss scales and counts that live there change no bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from cuda_device import CUDA, keep_busy, needs_gpu
from helpers import CODEC_NAMES, RULES
from kernel_problem import CPU, gradients, run, start
from late_problem import Problem, captured, scenarios
from ranks.snapshot import assert_same
from shardopt import clip_grad_norm_
from weight_formats import BF16

#: The others compute gradients by products of matrices, which have other bits on the CPU, or send messages.
NAMES = [name for name in scenarios(Path()) if not name.startswith(("released", "held", "messages"))]


@pytest.mark.parametrize("name", NAMES)
def test_scenarios(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that steps on a busy device, in any stream, have the CPU's bits: all that late_problem.py tries."""
    wanted = scenarios(tmp_path)[name](CPU)
    monkeypatch.setattr(Problem, "before_gradients", keep_busy)
    assert_same(scenarios(tmp_path)[name](CUDA), wanted)


@needs_gpu
@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", [rule for rule in RULES if "prodigy" not in rule])
def test_graph_replays(rule: str, codec: str) -> None:
    """Shows that a captured step replays to the CPU's bits, with changed rates and an eager step between."""
    assert_same(captured(CUDA, rule=rule, codec=codec), captured(CPU, rule=rule, codec=codec))


@needs_gpu
@pytest.mark.parametrize(
    ("options", "without", "message"),
    [
        ({}, (0,), "CUDA graph"),  # other tables than in the step before
        ({"rule": "prodigy"}, (), "sums over all parameters"),
        ({"offload": "state"}, (), "captured into a CUDA graph"),
    ],
)
def test_a_capture_that_would_wait_is_refused(options: dict[str, str], without: tuple[int, ...], message: str) -> None:
    """Shows that a capture is refused which would make tables, read sums, or copy state."""
    problem = Problem(CUDA, **options)
    problem.step(0)
    problem.set_gradients(1, without)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        problem.optimizer.step()


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_step_does_not_synchronize(codec: str) -> None:
    """Shows that a step never waits for the device."""
    lr = torch.tensor(1e-2, device=CUDA)
    problem = Problem(CUDA, codec=codec, lr=lr)
    problem.step(0)
    for t in (1, 2, 3):
        with no_synchronization():
            lr.mul_(0.5)
            problem.step(t)


@needs_gpu
def test_clipping_does_not_synchronize() -> None:
    """Shows that clipping never waits for the device."""
    params = [torch.nn.Parameter(torch.zeros(300, 40, device=CUDA)) for _ in range(5)]
    for step in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        with no_synchronization() if step else nullcontext():  # the first one makes tables
            for kind in (2.0, math.inf):
                clip_grad_norm_(params, 0.5, kind)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_current_device_does_not_matter() -> None:
    """Shows that a step runs on its parameters' device, whichever is current."""
    shapes = ((97, 130), (257,))
    steps = [gradients(t, BF16, shapes) for t in (1, 2)]
    with torch.cuda.device(0):
        actual, _ = run("adamw", "log8", start(BF16, shapes), steps, torch.device("cuda", 1))
        assert torch.cuda.current_device() == 0
    assert_same(actual, run("adamw", "log8", start(BF16, shapes), steps)[0])


def test_the_next_step_warns_of_skipped_elements() -> None:
    """Shows that the step after one with bad gradients warns of their number."""
    problem = Problem(CUDA)
    problem.step(0, bad=5)  # of each of 4 parameters
    problem.result()
    with pytest.warns(RuntimeWarning, match="20 gradient elements"):
        problem.step(1)
    assert problem.optimizer.nonfinite_count == 20
