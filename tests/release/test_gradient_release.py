"""Steps during the backward pass: parameters used several times, how releases end and fail, and what is refused.

The bits of more rules and layouts: tests/distributed/test_layouts.py, at random tests/checkpoint/attack/releases.py.
That few gradients live at once: tests/distributed/test_sharded_gradient_release.py.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.checkpoint import checkpoint

import shardopt
from helpers import RULES, everything
from ranks.models import loss_of, make_batch, make_net
from ranks.offload import offload_from_cpu
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from step_problem import tables_made

STEPS = 4


def optimizer_of(model: nn.Module, rule: str = "adamw", **options: Any) -> ShardedOptimizer:
    """Two param groups with options of their own."""
    params = list(model.parameters())
    groups = [{"params": params[:5]}, {"params": params[5:], "weight_decay": 0.03, "lr": 2e-3, "block_size": 32}]
    return RULES[rule].make(groups, **{"min_quantized_numel": 64, **options})


class Pair:
    """One model twice, with an optimizer each: one whose gradients are released, and one with ordinary steps."""

    def __init__(self, model: nn.Module, rule: str = "adamw", **options: Any) -> None:
        self.models = (model, copy.deepcopy(model))
        self.released, self.ordinary = (optimizer_of(m, rule, **copy.deepcopy(options)) for m in self.models)
        self.schedules = [ExponentialLR(o, 0.8) for o in (self.released, self.ordinary)]
        self.release = shardopt.release_gradients(self.models[0], self.released)

    def step(self, number: int, left: tuple[str, ...] | None = ()) -> None:
        """One turn of the usual loop for each. Gradients of parameters in ``left``, if known, live until ``step()``."""
        for model, optimizer, schedule in zip(self.models, (self.released, self.ordinary), self.schedules, strict=True):
            loss_of(model, make_batch(number)).backward()
            if optimizer is self.released and left is not None:
                gradients = ((name, param.grad) for name, param in model.named_parameters())
                assert tuple(name for name, x in gradients if x is not None and x.any()) == left  # but for the guard
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def run(self, steps: int = STEPS, **how: Any) -> None:
        for number in range(steps):
            self.step(number, **how)
            self.compare()

    def compare(self) -> None:
        assert_same(everything(self.released), everything(self.ordinary))


def test_tables_are_kept() -> None:
    """One plan per parameter, through new learning rates."""
    pair = Pair(make_net())
    with tables_made() as made:
        for number in range(3):
            loss_of(pair.models[0], make_batch(number)).backward()
            pair.released.step()
            pair.schedules[0].step()
    assert made == [1] * len(list(pair.models[0].parameters()))


def test_removed() -> None:
    """``step()`` changes and counts nothing when every gradient was stepped already."""
    pair = Pair(make_net())
    pair.run(2)
    before = everything(pair.released)
    pair.released.step()
    assert_same(everything(pair.released), before)
    pair.release.remove()
    pair.release.remove()
    assert not any(param._post_accumulate_grad_hooks for param in pair.models[0].parameters())
    assert not pair.models[0]._forward_pre_hooks
    names = tuple(name for name, _ in pair.models[0].named_parameters())
    pair.run(1, left=names)
    with shardopt.release_gradients(pair.models[0], pair.released) as release:
        assert isinstance(release, shardopt.GradientRelease)
        pair.run(2)
    inner = pair.models[0].conv  # and with parameters left over
    with shardopt.release_gradients(inner, pair.released):
        pair.run(2, left=tuple(name for name in names if not name.startswith("conv")))


class Dropped(nn.Module):
    """A layer that forward passes run in so many checkpoints each."""

    def __init__(self, times: tuple[int, ...], *, reentrant: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Embedding(97, 64), nn.Linear(64, 64)
        self.last = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 97))
        self.times, self.reentrant, self.passes = times, reentrant, 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens)
        for _ in range(self.times[self.passes % len(self.times)]):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        self.passes += 1
        return self.last(x)


@pytest.mark.parametrize("model", [Dropped((2, 0, 3), reentrant=False), Dropped((1, 0))])
def test_checkpointed_parameters_are_stepped_once_in_the_backward_pass(model: nn.Module) -> None:
    Pair(model).run()


@pytest.mark.filterwarnings("ignore:zero_grad:RuntimeWarning")
@pytest.mark.parametrize(("overlap_forward", "micro_batches"), [(False, 1), (False, 2), (True, 1)])
def test_parameters_in_two_reentrant_checkpoints_are_refused(overlap_forward: bool, micro_batches: int) -> None:
    """Each checkpoint gives a part of the gradient, which counts as a gradient. PyTorch may notice the step before."""
    model = Dropped((2,))
    optimizer = optimizer_of(model, offload="step")
    options = {"overlap_forward": overlap_forward, "micro_batches": micro_batches}
    message = rf"got gradient {micro_batches + 1} since the last optimizer.step\(\).*use_reentrant=False|is at version"
    with offload_from_cpu(), shardopt.release_gradients(model, optimizer, **options):
        for number in range(micro_batches - 1):
            loss_of(model, make_batch(number)).backward()
        with pytest.raises(RuntimeError, match=message):
            loss_of(model, make_batch(9)).backward()
        optimizer.zero_grad()


def test_nonfinite_elements_are_counted() -> None:
    """And warned of by ``step()``; the count stays when the release ends."""
    pair = Pair(make_net())
    for model in pair.models:
        model.up.weight.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), torch.nan))
    for number in range(2):
        with pytest.warns(RuntimeWarning, match="skipped 66 gradient elements") as caught:
            pair.step(number)
        assert {each.filename for each in caught} == {__file__}
        pair.compare()
        assert pair.released.nonfinite_count == 66 * (number + 1)
    loss_of(pair.models[0], make_batch(3)).backward()
    pair.release.remove()
    assert pair.released.nonfinite_count == 3 * 66
    with shardopt.release_gradients(pair.models[0], pair.released):
        assert pair.released.nonfinite_count == 3 * 66


# Ends, failures and refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap_forward", [False, True])
def test_a_release_ends_with_its_optimizer(overlap_forward: bool) -> None:
    """The optimizer is freed though the model lives."""
    model = nn.Sequential(make_net(), nn.Linear(97, 5))
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    shardopt.release_gradients(model, optimizer, overlap_forward=overlap_forward)
    for number in range(2):
        loss_of(model, make_batch(number) % 5).backward()
        optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    loss_of(model, make_batch(0) % 5).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_copies_are_not_released() -> None:
    """Of models, copied or pickled, and of optimizers."""
    model = make_net()
    optimizer = optimizer_of(model)
    shardopt.release_gradients(model, optimizer, overlap_forward=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other, make_batch(0)).backward()
        assert all(param.grad is not None for param in other.parameters())
    assert not optimizer.state
    copied = copy.deepcopy(optimizer)
    param = copied.param_groups[0]["params"][0]
    before = param.detach().clone()
    param.grad = torch.ones_like(param)
    copied.step()
    assert not torch.equal(param, before)


def test_a_backward_pass_that_failed_can_be_discarded(tmp_path: Path) -> None:
    """Parameters that it has stepped stay stepped, with a warning; a checkpoint brings them back."""
    pair = Pair(make_net())
    model, optimizer = pair.models[0], pair.released
    pair.step(0)
    shardopt.checkpoint.save(tmp_path, model, optimizer)

    def fail(module: nn.Module, given: Any, embedded: Tensor) -> None:
        embedded.register_hook(lambda _: 1 / 0)

    for discards in (True, False):
        handle = model.embed.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, make_batch(1)).backward()
        handle.remove()
        assert [int(optimizer.state[p]["step"]) for p in (model.up.weight, model.embed.weight)] == [2, 1]
        if discards:
            with pytest.warns(RuntimeWarning, match="in which 12 of 13 parameters were stepped already") as caught:
                optimizer.zero_grad()
            assert caught[0].filename == __file__
        shardopt.checkpoint.load(tmp_path, model, optimizer)
    for number in range(1, STEPS):
        pair.step(number)
        pair.compare()


def test_pinned_gradients_on_the_cpu_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of fully_shard's CPUOffloadPolicy is queued in the current stream."""
    late: list[tuple[Tensor, Tensor]] = []

    class Stream:
        def synchronize(self) -> None:
            for gradient, value in late:
                gradient.copy_(value)

    def offload(param: Tensor) -> None:
        assert param.grad is not None
        late[:] = [(param.grad, param.grad.clone())]
        param.grad.fill_(torch.nan)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(Tensor, "is_pinned", lambda self, *_: any(self is gradient for gradient, _ in late))
    pair = Pair(make_net())
    pair.release.remove()
    pair.models[0].up.weight.register_post_accumulate_grad_hook(offload)
    pair.release = shardopt.release_gradients(pair.models[0], pair.released)
    pair.run(1)
    assert late


# Refusals -----------------------------------------------------------------------------------------------------


def test_calls_of_a_released_optimizer_are_refused() -> None:
    pair = Pair(make_net())
    model, optimizer = pair.models[0], pair.released
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # one that is off is let pass
    scaler.scale(loss_of(model, make_batch(0))).backward()
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"got gradient 2 .* expected 1 at most"):
        loss_of(model, make_batch(1)).backward()
    assert_same(everything(optimizer), before)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="got a closure while gradients are released"):
        optimizer.step(lambda: 0.0)
    model.zero_grad()
    with pytest.raises(RuntimeError, match="released already"):
        shardopt.release_gradients(model, optimizer)
    optimizer.param_groups[0]["params"].reverse()
    with pytest.raises(RuntimeError, match="no longer where it was when gradients were released"):
        loss_of(model, make_batch(0)).backward()


@pytest.mark.filterwarnings("ignore:zero_grad:RuntimeWarning")
@pytest.mark.parametrize("unscales", [False, True])
def test_loss_scaling_is_refused(unscales: bool) -> None:
    """Also where GradScaler would unscale gradients by itself, as ``step`` has a hook."""
    model = make_net()
    optimizer = optimizer_of(model, offload="step")
    optimizer.register_step_post_hook(lambda *_: None)
    with offload_from_cpu(), shardopt.release_gradients(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss_of(model, make_batch(0))).backward()
        if unscales:
            scaler.unscale_(optimizer)
        with pytest.raises(
            RuntimeError, match=r"got torch\.amp\.GradScaler while .* release them with overlap_forward=True"
        ):
            scaler.step(optimizer)
        optimizer.zero_grad()


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_])
def test_clipping_of_torch_is_refused_by_the_step(clip: Callable[[Any, float], Any]) -> None:
    """Clipping has changed nothing: the next call of ``step()`` goes on."""
    pair = Pair(make_net())
    loss_of(pair.models[0], make_batch(1)).backward()
    clip(pair.models[0].parameters(), 0.1)
    with pytest.raises(RuntimeError, match="got clipping while gradients are released"):
        pair.released.step()
    assert all(param.grad is None for param in pair.models[0].parameters())
    pair.released.step()
    loss_of(pair.models[1], make_batch(1)).backward()
    pair.ordinary.step()
    pair.compare()
    loss_of(pair.models[0], make_batch(2)).backward()
    pair.release.remove()
    assert all(param.grad is None for param in pair.models[0].parameters())


def test_wrong_arguments_are_refused() -> None:
    """Nothing is hooked in then."""
    model = make_net()
    optimizer, release = optimizer_of(model), shardopt.release_gradients
    for option, wrong in (("waiting_gradients", 0), ("micro_batches", 1.5), ("micro_batches", True)):
        with pytest.raises(ValueError, match=f"{option}: got {wrong!r}, expected at least 1, a whole number"):
            release(model, optimizer, **{option: wrong})
    with pytest.raises(TypeError, match="got AdamW, expected an optimizer of shardopt"):
        release(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no trained parameter of the model"):
        release(make_net(), optimizer)
    prodigy = shardopt.Prodigy8bit(model.parameters())
    with pytest.raises(ValueError, match="got Prodigy8bit, whose step needs sums over all gradients"):
        release(model, prodigy)
    with pytest.raises(ValueError, match="got a param group with nonfinite='raise'"):
        release(model, optimizer_of(model, nonfinite="raise"))
    loss_of(model, make_batch(0)).backward()
    with pytest.raises(RuntimeError, match="got 13 parameters that have a gradient"):
        release(model, optimizer)
    prodigy.step()
    prodigy.zero_grad()
    release(model, optimizer)
    optimizer.param_groups[1]["nonfinite"] = "raise"
    with pytest.raises(ValueError, match="got a param group with nonfinite='raise'"):
        loss_of(model, make_batch(0)).backward()


def test_errors_name_the_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 4, sparse=True))
    optimizer = shardopt.AdamW8bit(model.parameters())
    shardopt.release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match=r"parameter 2 of param group 0 \(3, 4\): got a sparse gradient"):
        model[1](torch.tensor([1])).sum().backward()
    assert not optimizer.state
