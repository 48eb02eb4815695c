"""State offloaded from a GPU: the bits of a step without offload, copies that overlap, memory of fixed size."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

import pytest
import torch

import shardopt
from cuda_device import CUDA, keep_busy, needs_gpu
from estimate_problem import TOKENS, Layers, assert_near, estimated_model
from helpers import CODEC_NAMES
from kernel_problem import CPU
from late_problem import Problem, slept, steps
from ranks.models import loss_of, make_batch, make_net
from ranks.snapshot import Snapshot, assert_same, snapshot
from shardopt.estimate import Setup, estimate
from shardopt.kernels.transfers_cuda import pin_memory
from shardopt.state import residency
from weight_formats import BF16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "CHUNK_BYTES", 64 << 10)


@needs_gpu
@pytest.mark.parametrize(("offload", "codec"), [*product(["state", "step"], CODEC_NAMES)])
def test_same_bits(offload: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that offloaded steps on a busy device have the CPU's bits, and that state may sleep between steps."""
    monkeypatch.setattr(Problem, "before_gradients", keep_busy)
    options = {"codec": codec, "master_weight_bits": 24}
    assert_same(steps(CUDA, 30_000, offload=offload, **options), steps(CPU, **options))
    assert_same(slept(CUDA, **options), slept(CPU, **options))


@needs_gpu
def test_state_lives_in_locked_host_memory() -> None:
    """Shows that offloaded state is pinned, also where it sleeps, and only the step count stays on the device."""
    for options in ({"offload": "state"}, {}):
        problem = Problem(CUDA, **options)
        problem.step(0)
        problem.optimizer.synchronize()
        if not options:
            problem.optimizer.offload()
            assert shardopt.memory_report(problem.optimizer).device.scales == 0
        for state in problem.optimizer.state.values():
            assert state["step"].is_cuda
            assert all(value.is_pinned() and not value.is_cuda for key, value in state.items() if key != "step")
    problem.optimizer.reload()
    assert shardopt.memory_report(problem.optimizer).host.state == 0


@needs_gpu
def test_device_memory_does_not_grow_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the device holds slots, and tables of 4,608 bytes per chunk with a count of 512."""
    chunk = 1 << 20
    monkeypatch.setattr(residency, "CHUNK_BYTES", chunk)
    used = []
    for rows in (1024, 8192):
        param = torch.nn.Parameter(torch.zeros(rows, 1024, dtype=BF16, device=CUDA))
        param.grad = torch.ones_like(param)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        optimizer = shardopt.AdamW8bit([param], offload="state")
        optimizer.step()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated() - before)
        assert shardopt.memory_report(optimizer).device.offload_buffers == 3 * chunk
        del optimizer
    more_chunks = (8192 - 1024) * 1024 * 2.2 / chunk + 1
    assert used[1] - used[0] <= (4608 + 512) * more_chunks, used


def trained(
    offload: str | None, release: dict[str, Any] | None, micro: int = 1, scale: float | None = None, clip: bool = False
) -> Snapshot:
    """Norms, loss scale, parameters and state after four steps with late gradients."""
    model = make_net().to(CUDA)
    optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=64, offload=offload)
    if release is not None:
        shardopt.release_gradients(model, optimizer, **release)
    scaler = torch.amp.GradScaler(CUDA.type, init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
    found = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    for step in range(4):
        for i in range(micro):
            loss = loss_of(model, make_batch(10 * step + i).to(CUDA))
            keep_busy()
            scaler.scale(loss).backward()
        if scale is not None:
            scaler.unscale_(optimizer)
        if clip:
            found[f"norm {step}"] = shardopt.clip_grad_norm_(model.parameters(), 1e-2, optimizer=optimizer).cpu()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.use_deterministic_algorithms(False)
    optimizer.synchronize()
    found["scale"] = torch.tensor(scaler.get_scale())
    return {**found, **snapshot(dict(model.named_parameters()), optimizer)}


@pytest.mark.parametrize(
    ("offload", "overlap"),
    [
        (None, False),
        *(pytest.param(*how, marks=needs_gpu) for how in (("state", False), ("step", False), ("step", True))),
    ],
)
def test_gradient_release(offload: str | None, overlap: bool) -> None:
    """Shows that released gradients, also with offload, end with the plain run's bits."""
    assert_same(trained(offload, {"overlap_forward": overlap}), trained(None, None))


@needs_gpu
@pytest.mark.parametrize("scale", [None, 1000.0])
@pytest.mark.parametrize("micro", [1, 2])
def test_held_gradients(micro: int, scale: float | None) -> None:
    """Shows that clipped steps on the host beside the next forward pass have the bits of those on the device."""
    release = {"overlap_forward": True, "waiting_gradients": 2, "micro_batches": micro}
    assert_same(trained("step", release, micro, scale, clip=True), trained(None, None, micro, scale, clip=True))


@needs_gpu
def test_held_gradients_leave_the_device() -> None:
    """Shows that a backward pass adds no more gradients to the device's memory than may wait, in any model."""
    layers, numel, waiting = 24, 1 << 22, 2
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False, device=CUDA) for _ in range(layers)))
    optimizer = shardopt.AdamW8bit(model.parameters(), offload="step")
    shardopt.release_gradients(model, optimizer, overlap_forward=True, waiting_gradients=waiting)
    x = torch.ones(4, 2048, device=CUDA)
    for _ in range(2):  # the first one allocates what stays, such as workspaces
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        optimizer.step()
        optimizer.synchronize()
    assert peak <= (waiting + 2) * 4 * numel + (1 << 22), peak


@needs_gpu
def test_a_refused_lock_leaves_no_error_behind() -> None:
    """Shows that a failed pinning leaves no error that the next sound kernel would raise."""
    memory = torch.zeros(1 << 16, dtype=torch.uint8, pin_memory=True)
    with pytest.raises(MemoryError, match=r"got CUDA error \d+ for locking"):
        pin_memory(memory, object(), torch.device("cuda", 0))
    assert torch.ones(3, device=CUDA).sum() == 3
    Problem(CUDA).step(0)
    torch.cuda.synchronize()


@pytest.mark.parametrize("offload", [None, "state", "step"])
@needs_gpu
def test_estimated_memory(offload: str | None) -> None:
    """Shows that a run takes the memory that was estimated, on the device and on the host."""
    setup = Setup(options={"master_weight_bits": 24, "offload": offload})
    net = Layers().to("cuda").bfloat16()
    optimizer = shardopt.AdamW8bit(net.parameters(), **setup.options)
    net(TOKENS.to("cuda")).backward()
    optimizer.step()
    optimizer.synchronize()
    actual, expected = shardopt.memory_report(optimizer), estimate(estimated_model(), setup)
    assert_near(asdict(actual.device), asdict(expected.device))
    assert_near(asdict(actual.host), asdict(expected.host))
