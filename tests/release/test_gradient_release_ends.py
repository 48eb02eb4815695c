"""How releases end and backward passes fail, and what is refused: nothing is leaked, and training goes on."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardopt
from helpers import everything
from live_bytes import LiveBytes
from ranks.models import loss_of, make_batch, make_net
from ranks.snapshot import assert_same
from test_gradient_release import STEPS, Pair, optimizer_of


def _released(overlap_forward: bool) -> list[weakref.ref[Any]]:
    model = nn.Sequential(make_net(), nn.Linear(97, 5))
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    shardopt.release_gradients(model, optimizer, overlap_forward=overlap_forward)
    for number in range(2):
        loss_of(model, make_batch(number) % 5).backward()
        optimizer.step()
    return [weakref.ref(x) for x in (model, optimizer, *model.parameters())]


@pytest.mark.parametrize("overlap_forward", [False, True])
def test_nothing_outlives_model_and_optimizer(overlap_forward: bool) -> None:
    _released(overlap_forward)  # what is made once
    gc.collect()
    with LiveBytes() as live:
        refs = _released(overlap_forward)
        gc.collect()
    assert not any(ref() is not None for ref in refs)
    assert live.now == 0


def test_a_release_ends_with_its_optimizer() -> None:
    """A deleted optimizer's state is freed, and another optimizer can release gradients."""
    model = make_net()
    optimizer = optimizer_of(model)
    shardopt.release_gradients(model, optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    loss_of(model, make_batch(0)).backward()
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad()
    shardopt.release_gradients(model, optimizer_of(model))
    loss_of(model, make_batch(0)).backward()


@pytest.mark.parametrize("overlap_forward", [False, True])
def test_copied_and_pickled_models_are_not_released(overlap_forward: bool) -> None:
    model = make_net()
    optimizer = optimizer_of(model)
    shardopt.release_gradients(model, optimizer, overlap_forward=overlap_forward)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other, make_batch(0)).backward()
        assert all(param.grad is not None for param in other.parameters())
    assert not optimizer.state


class Interrupted(nn.Module):
    """Fails in the backward pass, when half of the parameters were stepped."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.fails = make_net(), False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.net.embed(tokens)
        if self.fails:
            x.register_hook(self._fail)
        x = self.net.up(x)
        return x @ self.net.head.weight.new_ones(192, 97)

    def _fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("failed")


@pytest.mark.parametrize("discards", ["zero_grad", "zeroes", "load_state_dict", "checkpoint"])
def test_a_backward_pass_that_failed_can_be_discarded(discards: str, tmp_path: Path) -> None:
    """Parameters that it has stepped stay stepped, with a warning; a checkpoint brings them back."""
    pair = Pair(Interrupted())
    model, optimizer = pair.models[0], pair.released
    pair.step(0)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    for _ in range(2):
        model.fails = True
        with pytest.raises(ArithmeticError, match="failed"):
            loss_of(model, make_batch(1)).backward()
        model.fails = False
        assert [int(optimizer.state[p]["step"]) for p in (model.net.up.weight, model.net.embed.weight)] == [2, 1]
        if discards in ("zero_grad", "zeroes"):
            with pytest.warns(RuntimeWarning, match="in which 2 of 13 parameters were stepped already") as caught:
                optimizer.zero_grad(discards == "zero_grad")
            assert caught[0].filename == __file__
        if discards == "checkpoint":
            shardopt.checkpoint.load(tmp_path, model, optimizer)
        else:
            optimizer.load_state_dict(copy.deepcopy(saved))
            model.load_state_dict(weights)
    for number in range(1, STEPS):
        pair.step(number)
        pair.compare()


def test_training_goes_on_from_what_was_stepped() -> None:
    pair = Pair(Interrupted())
    for model, optimizer in zip(pair.models, (pair.released, pair.ordinary), strict=True):
        model.fails = True
        with pytest.raises(ArithmeticError):
            loss_of(model, make_batch(1)).backward()
        model.fails = False
        if optimizer is pair.ordinary:
            optimizer.step()  # with the gradients that had come
            optimizer.zero_grad()
        else:
            with pytest.warns(RuntimeWarning, match="stay stepped"):
                optimizer.zero_grad()
    pair.compare()
    pair.step(1)
    pair.compare()


def test_pinned_gradients_on_the_cpu_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of fully_shard's CPUOffloadPolicy is queued in the current stream."""
    pinned: set[int] = set()
    waited: list[int] = []

    class Stream:
        def synchronize(self) -> None:
            waited.append(1)
            for gradient, value in late:
                gradient.copy_(value)
            late.clear()

    late: list[tuple[Tensor, Tensor]] = []
    initialized = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(Tensor, "is_pinned", lambda self, *_: id(self) in pinned or self.data_ptr() in pinned)
    pair = Pair(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 97, bias=False)))
    first, second = pair.models[0].parameters()

    def run() -> None:
        for model, optimizer in zip(pair.models, (pair.released, pair.ordinary), strict=True):
            model(torch.linspace(-1, 1, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        pair.compare()

    run()
    assert not waited

    def offload(param: Tensor) -> None:
        gradient = param.grad
        assert gradient is not None
        late.append((gradient, gradient.clone()))
        gradient.fill_(torch.nan)
        pinned.add(gradient.data_ptr())

    pair.release.remove()
    first.register_post_accumulate_grad_hook(offload)
    pair.release = shardopt.release_gradients(pair.models[0], pair.released)
    initialized[0] = True
    run()
    assert waited == [1]
    assert second.grad is None


# Refusals -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(make_net())
    yield made
    made.release.remove()


def test_two_backward_passes_are_refused(pair: Pair) -> None:
    loss_of(pair.models[0], make_batch(0)).backward()
    before = everything(pair.released)
    with pytest.raises(RuntimeError, match=r"got gradient 2 .* stepped after 1, expected as many"):
        loss_of(pair.models[0], make_batch(1)).backward()
    assert_same(everything(pair.released), before)


@pytest.mark.parametrize("unscale", [False, True])
def test_loss_scaling_is_refused(pair: Pair, unscale: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(pair.models[0], make_batch(0))).backward()
    if unscale:
        scaler.unscale_(pair.released)
    with pytest.raises(RuntimeError, match=r"got torch\.amp\.GradScaler while gradients are released"):
        scaler.step(pair.released)


def test_a_scaler_that_is_off_is_let_pass(pair: Pair) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(pair.models[0], make_batch(0))).backward()
    scaler.step(pair.released)


def test_calls_of_a_released_optimizer_are_refused(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match="got a closure while gradients are released"):
        pair.released.step(lambda: 0.0)
    with pytest.raises(RuntimeError, match="released already"):
        shardopt.release_gradients(pair.models[0], pair.released)
    pair.released.param_groups[0]["params"].reverse()
    with pytest.raises(RuntimeError, match="no longer where it was when gradients were released"):
        loss_of(pair.models[0], make_batch(0)).backward()


def test_raising_at_nonfinite_gradients_is_refused() -> None:
    model = make_net()
    optimizer = optimizer_of(model, nonfinite="raise")
    with pytest.raises(ValueError, match="got a param group with nonfinite='raise'"):
        shardopt.release_gradients(model, optimizer)
    optimizer.param_groups[0]["nonfinite"] = optimizer.param_groups[1]["nonfinite"] = "skip"
    shardopt.release_gradients(model, optimizer)
    optimizer.param_groups[1]["nonfinite"] = "raise"
    with pytest.raises(ValueError, match="got a param group with nonfinite='raise'"):
        loss_of(model, make_batch(0)).backward()


def test_pending_gradients_are_refused() -> None:
    model = make_net()
    optimizer = optimizer_of(model)
    loss_of(model, make_batch(0)).backward()
    with pytest.raises(RuntimeError, match="got 13 parameters that have a gradient"):
        shardopt.release_gradients(model, optimizer)
    optimizer.zero_grad()
    shardopt.release_gradients(model, optimizer)


def test_wrong_arguments_are_refused() -> None:
    """Nothing is hooked in then."""
    model = make_net()
    optimizer, release = optimizer_of(model), shardopt.release_gradients
    for option in ("waiting_gradients", "micro_batches"):
        for wrong in (0, 1.5, "4", True, None):
            with pytest.raises(ValueError, match=f"{option}: got {wrong!r}, expected at least 1, a whole number"):
                release(model, optimizer, **{option: wrong})
    with pytest.raises(TypeError, match="got AdamW, expected an optimizer of shardopt"):
        release(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no trained parameter of the model"):
        release(make_net(), optimizer)
    prodigy = shardopt.Prodigy8bit(model.parameters())
    with pytest.raises(ValueError, match="got Prodigy8bit, whose step needs sums over all gradients"):
        release(model, prodigy)
    prodigy.step()


def test_errors_name_the_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 4, sparse=True))
    optimizer = shardopt.AdamW8bit(model.parameters())
    shardopt.release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match=r"parameter 2 of param group 0 \(3, 4\): got a sparse gradient"):
        model[1](torch.tensor([1])).sum().backward()
    assert not optimizer.state
