"""Gradients held in the host's memory until step(): clipping, micro-batches and loss scales as without offload."""

from __future__ import annotations

import copy
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import shardopt
from ranks.loop import OFFLOADED, RELEASED, Drive, Layers, Loop, batch, compare
from ranks.offload import before_steps, offload_from_cpu, slow_steps
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from shardopt.release import host_gradients
from shardopt.release.backward import BackwardRelease
from shardopt.state import host_memory
from test_gradient_release import Dropped


@pytest.fixture(autouse=True)
def from_cpu() -> Iterator[None]:
    with offload_from_cpu():
        yield


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batches": 2, "codec": "dynamic8"},
        {"max_norm": 1e-3, "kind": "NAdam8bit"},
        {"micro_batches": 3, "max_norm": 1e3},
        {"micro_batches": 2, "max_norm": 1e-3, "norm_type": torch.inf, "kind": "Lion8bit"},
        {"micro_batches": 2, "max_norm": 1e-2, "kind": "LAMB8bit"},
        {"max_norm": 1e-3, "nonfinite": "propagate"},
        {"dtype": torch.bfloat16, "master_weight_bits": 24, "max_norm": 1e-3},
        # The largest scale makes some gradients infinite: these steps are left out, and the scale goes down.
        {"scale": 1000.0, "micro_batches": 2, "max_norm": 1e-3},
        {"scale": 1e38, "micro_batches": 2},
        {"scale": 1e38, "max_norm": 1e-3},
        {"scale": 256.0, "dtype": torch.float16},
        # Not held: stepped in the backward pass that brings the last gradient, or by step().
        {"micro_batches": 3, "max_norm": 1e-3, "offload": None},
        {"micro_batches": 3, **OFFLOADED},
        {"micro_batches": 3, **RELEASED},
        # Gradients of one piece and of several, on their way to the sum itself and through memory in between.
        {"chunk": 6000, "micro_batches": 2, "max_norm": 1e-3},
        {"chunk": 1 << 20, "max_norm": 1e-3},
    ],
    ids=str,
)
def test_as_without_offload(options: dict[str, Any]) -> None:
    compare(**options)


class Pictures(nn.Module):
    """Convolutions whose weights are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)])
        self.to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.float().view(1, 1, 4, 7).expand(2, 3, 4, 7).contiguous(memory_format=torch.channels_last)
        x = nn.functional.pad(x, (2, 2, 2, 2))
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Pictures, {"micro_batches": 2, "max_norm": 1e-3}),
        (partial(Dropped, (2,), reentrant=False), {"max_norm": 1e-3}),
        (partial(Dropped, (1, 0)), {"micro_batches": 3, "max_norm": 1e-3}),
        # step() steps what the last micro-batch did not bring.
        (partial(Dropped, (1, 0)), {"micro_batches": 3, **RELEASED}),
    ],
)
def test_models(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """Strided parameters, layers not called in some passes, and reentrant checkpoints."""
    compare(partial(Loop.run, steps=6), make, **options)


# Other loops than the usual one.


def clips_some_steps(loop: Loop) -> None:
    """Shares of the norm are taken beside the backward pass after a step that was clipped, and at once otherwise."""
    for step, max_norm in enumerate((None, 1e-3, None, 1e-3, 1e-3)):
        loop.max_norm = max_norm
        loop.step(step)


def evaluates_and_clips_between(loop: Loop) -> None:
    """Shares of sums that grow afterwards count once."""
    for number in range(6):
        loop.evaluate()
        loop.loss(number).backward()
        if loop.scaler is not None and number % 2 == 0:
            loop.scaler.unscale_(loop.optimizer)
        loop.clip()
        if number % 2:
            loop.update()


def passes_forward_twice(loop: Loop) -> None:
    for number in range(3):
        (loop.loss(number) + loop.loss(number + 7)).backward()
        loop.update()


def throws_gradients_away(loop: Loop) -> None:
    """By loading, and by zero_grad() without a warning."""
    loop.step(0)
    saved = copy.deepcopy(loop.optimizer.state_dict())
    for step in (1, 2):
        loop.backward(7)
        if step == 1:
            loop.optimizer.load_state_dict(saved)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if step == 2 or not loop.held:
                loop.optimizer.zero_grad()
        loop.optimizer.step()
        loop.step(step)
    loop.backward(7)
    loop.clip()  # gradients that the load throws away, not the next ones
    loop.optimizer.load_state_dict(saved)
    if not loop.held:
        loop.optimizer.zero_grad()
    loop.backward(8)
    loop.update()


def removes_the_release(loop: Loop) -> None:
    loop.step(0)
    if loop.held:
        loop.backward(1)
        with pytest.warns(RuntimeWarning, match=r"throws away the gradients of 17 parameters"):
            loop.release.remove()
        for module in loop.model.modules():
            hooks = (module._forward_pre_hooks, module._forward_hooks)
            assert not any((*hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks))
    loop.step(1)


def adds_to_gradients(loop: Loop) -> None:
    """After the backward pass."""
    other = copy.deepcopy(loop.model)
    for model in (loop.model, other):
        model(batch(int(model is other))).square().mean().backward()
    for param, copied in zip(loop.model.parameters(), other.parameters(), strict=True):
        param.grad = copied.grad if param.grad is None else param.grad + copied.grad
    loop.clip()
    loop.optimizer.step()


def freezes(loop: Loop) -> None:
    """Between steps, and after the backward pass, when the norm still counts what is frozen."""
    loop.model.layers[2].requires_grad_(False)
    loop.step(0)
    loop.model.layers[1].requires_grad_(False)
    loop.backward(1)
    loop.model.requires_grad_(False)
    loop.clip()
    loop.update()
    loop.model.requires_grad_(True)
    loop.step(2)


def steps_by_closure(loop: Loop) -> None:
    def closure() -> float:
        loop.optimizer.zero_grad()
        loss = loop.loss(3)
        loss.backward()
        return float(loss.detach())

    for _ in range(2):
        loop.optimizer.step(closure)


def _raise(error: type[BaseException], *_: Any) -> None:
    raise error("planted")


def waits_that_are_interrupted(loop: Loop) -> None:
    """A forward pass after one that was interrupted still waits for the step that the latter had waited for."""
    loop.step(0)
    for name in ("WorkerTask", "WorkerThread") if loop.held else ():  # of a layer, of all
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"shardopt.release.worker.{name}.wait", partial(_raise, KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                loop.evaluate() if name == "WorkerTask" else loop.optimizer.synchronize()
    loop.evaluate()
    loop.step(1)


@pytest.mark.parametrize(
    ("drive", "options"),
    [
        (clips_some_steps, {"micro_batches": 2}),
        (evaluates_and_clips_between, {"micro_batches": 2, "scale": 1024.0}),
        (passes_forward_twice, {}),
        (throws_gradients_away, {"micro_batches": 2, "max_norm": 1e-3}),
        (removes_the_release, {}),
        (adds_to_gradients, {"micro_batches": 2}),
        (freezes, {"micro_batches": 2, "max_norm": 1e-3}),
        (steps_by_closure, {}),
        (waits_that_are_interrupted, {}),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_loops(drive: Drive, options: dict[str, Any]) -> None:
    compare(drive, **options)


def test_checkpoints(tmp_path: Path) -> None:
    """While steps are under way and gradients are held, which are no part of them."""

    def drive(loop: Loop) -> None:
        loop.step(0)
        loop.loss(10).backward()
        folder = tmp_path / str(loop.held)
        shardopt.checkpoint.save(folder, loop.model, loop.optimizer)
        other = Loop(False, micro_batches=2)
        shardopt.checkpoint.load(folder, other.model, other.optimizer)
        loop.norms += other.result().values()
        loop.loss(11).backward()
        loop.optimizer.step()

    compare(drive, micro_batches=2, max_norm=1e-3)


def test_bfloat16_is_added_up_in_float32() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = shardopt.SGD8bit([weight], lr=1.0, momentum=0.9, offload="step")
    shardopt.release_gradients(nn.ParameterList([weight]), optimizer, overlap_forward=True, micro_batches=2)
    for gradient in (1.0, 2.0**-10):
        (weight * gradient).sum().backward()
    assert shardopt.clip_grad_norm_([weight], 9.0, optimizer=optimizer) == 1 + 2.0**-10
    optimizer.step()
    optimizer.synchronize()
    assert weight == -(2.0**-10)


@pytest.mark.parametrize("overlap", [False, True])
def test_waiting_gradients(overlap: bool) -> None:
    """At most ``waiting_gradients`` gradients live on the device, besides the one that backward is adding."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    optimizer = shardopt.AdamW8bit(model.parameters(), offload="step")
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    counts: list[int] = []

    def look(param: Tensor) -> None:
        assert param.grad is not None
        alive.add(param.grad)
        counts.append(len(alive))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    shardopt.release_gradients(model, optimizer, overlap_forward=overlap, waiting_gradients=2)
    with slow_steps(0.01):
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            assert not any(param.grad is not None and param.grad.any() for param in model.parameters())
            optimizer.step()
    assert len(counts) == 24
    assert max(counts) <= 3


def test_two_optimizers_clipped_together() -> None:
    results = []
    for held in (True, False):
        model = Layers()
        params, options = list(model.parameters()), {"offload": "step" if held else None}
        optimizers = [shardopt.AdamW8bit(some, lr=1e-2, **options) for some in (params[:5], params[5:])]
        for optimizer in optimizers if held else ():
            shardopt.release_gradients(model, optimizer, overlap_forward=True)
        for step in range(3):
            model(batch(step)).square().mean().backward()
            shardopt.clip_grad_norm_(model.parameters(), 1e-3, optimizer=optimizers)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        results.append(model.state_dict())
    assert_same(*results)


def test_an_error_of_a_step_is_raised_and_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass raises it, even if step() was still handing over others then."""
    loop = Loop(True)
    loop.step(0)
    loop.optimizer.synchronize()

    def fail(place: int) -> None:
        if place == 3:
            raise MemoryError("planted")

    defer = BackwardRelease._submit_step

    def slow_defer(*args: Any, **more: Any) -> None:
        defer(*args, **more)
        time.sleep(0.01)

    monkeypatch.setattr(BackwardRelease, "_submit_step", slow_defer)
    before = [param.detach().clone() for param in loop.model.parameters()]
    with before_steps(fail):
        loop.step(1)
        with pytest.raises(MemoryError, match="planted"):
            loop.model(batch(2))
    with suppress(MemoryError):  # if the layer raised it
        loop.optimizer.synchronize()
    changed = [not torch.equal(*pair) for pair in zip(loop.model.parameters(), before, strict=True)]
    assert changed == [index != 3 for index in range(17)]


@pytest.mark.parametrize("clips", [False, True])
def test_a_gradient_that_gets_lost_is_not_stepped(clips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host raises: the parameter is not stepped with what was in its place, however often it is tried."""
    loop = Loop(True)
    loop.step(0)
    before = {name: x.clone() for name, x in loop.result().items()}
    arrivals = iter(range(17))
    original = host_gradients.Staging.copied_pieces

    def copied_pieces(*args: Any, **how: Any) -> Any:
        if next(arrivals) == 16:
            raise MemoryError("planted")
        return original(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(host_gradients.Staging, "copied_pieces", copied_pieces)
        loop.backward(1)
        time.sleep(0.05)
        act = loop.clip if clips else loop.optimizer.step
        with pytest.raises(MemoryError, match="planted"):
            act()
        for again in (act, loop.optimizer.step):
            with pytest.raises(RuntimeError, match=r"did not arrive .* call optimizer.zero_grad\(\)"):
                again()
    assert all(torch.equal(param, before[str(i)]) for i, param in enumerate(loop.model.parameters()))
    loop.optimizer.zero_grad()
    loop.step(1)


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_cannot_be_held_is_refused(by_hand: bool) -> None:
    """One gradient too many, and an option that is set later."""
    loop = Loop(True, micro_batches=1 if by_hand else 2)
    loop.backward(0)
    count = loop.micro_batches + 1
    message = rf"got gradient {count} since the last optimizer.step\(\), expected {count - 1} at most"
    if by_hand:
        for param in loop.model.parameters():
            param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=message):
        loop.clip() if by_hand else loop.loss(2).backward()
    loop.model.zero_grad()
    loop.optimizer.zero_grad()
    loop.run(2)
    loop.backward(2)
    loop.optimizer.param_groups[0]["nonfinite"] = "raise"
    with pytest.raises(ValueError, match="nonfinite='raise' while gradients are released"):
        loop.optimizer.step()


def test_clipping_is_refused() -> None:
    """Without the optimizer that holds the gradients, in part, or after steps in the backward pass."""
    loop, other = Loop(True), Loop(False)
    loop.backward(0)
    params, clip = list(loop.model.parameters()), shardopt.clip_grad_norm_
    with pytest.raises(RuntimeError, match=r"17 parameters whose gradients are held .* optimizer=optimizer"):
        clip(params, 1.0)
    with pytest.raises(RuntimeError, match="17 parameters whose gradients are held"):
        clip(params, 1.0, optimizer=other.optimizer)
    with pytest.raises(ValueError, match="and 16 of its own that"):
        clip(params[:1], 1.0, optimizer=loop.optimizer)
    loop.optimizer.step()
    clip(params, 1.0)  # nothing is held any more
    shardopt.release_gradients(other.model, other.optimizer)
    with pytest.raises(RuntimeError, match="overlap_forward=True"):
        clip(other.model.parameters(), 1.0, optimizer=other.optimizer)


def test_too_little_host_memory_is_reported_at_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients alone, of 81 KB, would have room, but not with the state of 45 KB."""
    model = Layers()
    optimizer = shardopt.AdamW8bit(model.parameters(), offload="step")
    monkeypatch.setattr(host_memory, "_available_host_bytes", lambda: 120_000)
    with pytest.raises(MemoryError, match=r"offload: got 0 MiB of available host memory, expected"):
        shardopt.release_gradients(model, optimizer, overlap_forward=True)
    shardopt.release_gradients(model, optimizer)


def test_float16_gradients_are_not_unscaled_in_place() -> None:
    """As PyTorch refuses others. A step unscales without a rounding in between."""
    loop = Loop(True, dtype=torch.float16, scale=256.0)
    loop.backward(0)
    assert loop.scaler is not None
    with pytest.raises(ValueError, match=r"(?i)float16 gradients|fp16 gradients"):
        loop.scaler.unscale_(loop.optimizer)


# Scalers of other classes --------------------------------------------------------------------------------------------


class CallsItsBaseClass(GradScaler):
    """A scaler with an ``_unscale_grads_`` of its own."""

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(*args)


def wrapped_by_another_package(*args: Any, **options: Any) -> GradScaler:
    original = getattr(GradScaler._unscale_grads_, "__wrapped__", GradScaler._unscale_grads_)
    GradScaler._unscale_grads_ = wraps(original)(lambda *given: original(*given))  # type: ignore[method-assign]
    return GradScaler(*args, **options)


@pytest.mark.parametrize(
    ("make", "max_norm"), [(CallsItsBaseClass, 1e-3), (ShardedGradScaler, None), (wrapped_by_another_package, 1e-3)]
)
@pytest.mark.ranks(1)
def test_classes_of_scalers(make: Callable[..., GradScaler], max_norm: float | None) -> None:
    def drive(loop: Loop) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GradScaler, "_unscale_grads_", GradScaler._unscale_grads_)
            loop.scaler = make("cpu", init_scale=1024.0, growth_interval=2)  # may be newer than the release
            original = loop.loss
            loop.loss = lambda number: original(number) * (torch.inf if number == 10 else 1.0)  # type: ignore[method-assign]
            loop.run()

    compare(drive, scale=1.0, max_norm=max_norm)


def test_a_step_that_the_scaler_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are thrown away though only the model's zero_grad() is called, also those of too few passes."""
    monkeypatch.setattr(ShardedOptimizer, "_step_supports_amp_scaling", False)

    def drive(loop: Loop) -> None:
        assert loop.scaler is not None
        monkeypatch.setattr(loop.optimizer, "zero_grad", loop.model.zero_grad)
        loop.step(0)
        (loop.loss(1) * torch.inf).backward()
        loop.scaler.unscale_(loop.optimizer)
        loop.update()
        loop.step(2)

    compare(drive, micro_batches=2, scale=1024.0, max_norm=1e-3)
