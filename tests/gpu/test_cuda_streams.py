"""The step on a GPU never waits: streams, CUDA graphs, loss scales and counts that live on the device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from cuda_device import CPU, CUDA, make_on, needs_gpu, run, snapshot_of, step_on, synchronize
from helpers import CODEC_NAMES, RULES, Named
from kernel_problem import gradients, start
from ranks.snapshot import assert_same
from shardopt import clip_grad_norm_
from weight_formats import BF16

SHAPES = ((97, 130), (70, 33), (257,))


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_device(t: int) -> Named:
    return {name: gradient.to(CUDA) for name, gradient in gradients(t, BF16, SHAPES).items()}


@needs_gpu
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_step_does_not_synchronize(codec: str) -> None:
    """Shows that a step never waits for the device."""
    lr = torch.tensor(1e-2, device=CUDA)
    params, optimizer = make_on(CUDA, "adamw", codec, start(BF16, SHAPES), lr=lr)
    steps = [on_device(t) for t in (1, 2, 3, 4)]
    step_on(optimizer, params, steps[0])
    for gradient in steps[1:]:
        with no_synchronization():
            lr.mul_(0.5)
            step_on(optimizer, params, gradient)


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


@needs_gpu
@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", [rule for rule in RULES if "prodigy" not in rule])
def test_graph_replays_equal_eager_steps(rule: str, codec: str) -> None:
    """Shows that a captured step replays to the bits of eager ones, with changed rates and an eager step between."""
    rates = [1e-2, 1e-2, 5e-3, 2e-3, 1e-3]
    steps = [on_device(t) for t in (1, 2, 3, 4, 5)]

    def eager() -> dict[str, torch.Tensor]:
        lr = torch.zeros((), device=CUDA)
        params, optimizer = make_on(CUDA, rule, codec, start(BF16, SHAPES), lr=lr)
        for rate, gradient in zip(rates, steps, strict=True):
            lr.fill_(rate)
            step_on(optimizer, params, gradient)
        return snapshot_of(params, optimizer)

    lr = torch.full((), rates[0], device=CUDA)
    params, optimizer = make_on(CUDA, rule, codec, start(BF16, SHAPES), lr=lr)
    static = {name: gradient.clone() for name, gradient in steps[0].items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step_on(optimizer, params, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for i, (rate, gradient) in enumerate(list(zip(rates, steps, strict=True))[1:]):
        lr.fill_(rate)
        if i == 1:  # an eager step in between, with gradients elsewhere
            step_on(optimizer, params, gradient)
            continue
        for name, value in static.items():
            value.copy_(gradient[name])
        graph.replay()
    assert_same(snapshot_of(params, optimizer), eager())


@needs_gpu
def test_the_first_step_in_a_capture_is_refused() -> None:
    """Shows that a capture which would make tables is refused."""
    params, optimizer = make_on(CUDA, "adamw", "log8", start(BF16, SHAPES))
    step_on(optimizer, params, on_device(1))
    first = next(iter(params.values()))
    first.grad = None  # other tables than in the step before
    with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@needs_gpu
def test_a_rule_that_reads_its_sums_is_not_captured() -> None:
    """Shows that a rule which waits for its sums refuses to be captured."""
    params, optimizer = make_on(CUDA, "prodigy", "log8", start(BF16, SHAPES))
    step_on(optimizer, params, on_device(1))
    with pytest.raises(RuntimeError, match="sums over all parameters"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@needs_gpu
def test_side_streams() -> None:
    """Shows that steps run in the current stream, behind its work."""
    steps = [on_device(t) for t in (1, 2, 3, 4)]
    wanted, _ = run(CUDA, "adamw", "log8", start(BF16, SHAPES), steps)
    params, optimizer = make_on(CUDA, "adamw", "log8", start(BF16, SHAPES))
    previous = torch.cuda.current_stream()
    for gradient in steps:
        stream = torch.cuda.Stream()
        stream.wait_stream(previous)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # a step in another stream would not wait for this
            step_on(optimizer, params, gradient)
        previous = stream
    torch.cuda.synchronize()
    assert_same(snapshot_of(params, optimizer), wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_current_device_does_not_matter() -> None:
    """Shows that a step runs on its parameters' device, whichever is current."""
    steps = [gradients(t, BF16, SHAPES) for t in (1, 2)]
    wanted, _ = run(CPU, "adamw", "log8", start(BF16, SHAPES), steps)
    with torch.cuda.device(0):
        actual, _ = run(torch.device("cuda", 1), "adamw", "log8", start(BF16, SHAPES), steps)
        assert torch.cuda.current_device() == 0
    assert_same(actual, wanted)


def test_loss_scale_on_the_device() -> None:
    """Shows that GradScaler's scale acts as on the CPU, and that its overflow skips that step, and no other."""
    found = []
    for device in (CPU, CUDA):
        params, optimizer = make_on(device, "adamw", "log8", start(BF16, SHAPES))
        scaler = torch.amp.GradScaler(device.type, init_scale=3000.0)
        for t in (1, 2, 4, 5):
            before = snapshot_of(params, optimizer)
            for name, gradient in gradients(t, BF16, SHAPES).items():
                params[name].grad = scaler.scale(gradient.to(device) + (torch.inf if t == 2 else 0.0))
            scaler.step(optimizer)
            scaler.update()
            if t == 2:
                assert_same(snapshot_of(params, optimizer), before)
        found.append(snapshot_of(params, optimizer))
        assert scaler.get_scale() == 1500.0
    assert_same(found[1], found[0])


def test_the_next_step_warns_of_skipped_elements() -> None:
    """Shows that the step after one with bad gradients warns of their number."""
    params, optimizer = make_on(CUDA, "adamw", "log8", start(BF16, SHAPES))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_on(optimizer, params, on_device(1))
    bad = on_device(2)
    next(iter(bad.values())).view(-1)[:5] = torch.nan
    step_on(optimizer, params, bad)
    synchronize()
    for name, param in params.items():
        param.grad = on_device(4)[name]
    with pytest.warns(RuntimeWarning, match="5 gradient elements"):
        optimizer.step()
    assert optimizer.nonfinite_count == 5
