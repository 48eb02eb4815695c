"""Calls and options that raise while gradients are released; errors name the parameter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import shardopt
from helpers import everything
from ranks.models import loss_of, make_batch, make_net
from ranks.snapshot import assert_same
from test_gradient_release import Pair, optimizer_of


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


def test_closures_are_refused(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match="got a closure while gradients are released"):
        pair.released.step(lambda: 0.0)


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


def test_a_second_release_is_refused(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match="released already"):
        shardopt.release_gradients(pair.models[0], pair.released)


def test_sums_over_all_parameters_are_refused() -> None:
    model = make_net()
    optimizer = shardopt.Prodigy8bit(model.parameters())
    with pytest.raises(ValueError, match="got Prodigy8bit, whose step needs sums over all gradients"):
        shardopt.release_gradients(model, optimizer)
    optimizer.step()  # nothing was hooked in


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


@pytest.mark.parametrize("waiting", [0, 1.5, "4", True, None])
def test_waiting_gradients_are_a_number(waiting: object) -> None:
    model = make_net()
    with pytest.raises(ValueError, match=f"waiting_gradients: got {waiting!r}, expected at least 1, a whole number"):
        shardopt.release_gradients(model, optimizer_of(model), waiting_gradients=waiting)


def test_other_optimizers_are_refused() -> None:
    model = make_net()
    with pytest.raises(TypeError, match="got AdamW, expected an optimizer of shardopt"):
        shardopt.release_gradients(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="has no trained parameter of the model"):
        shardopt.release_gradients(make_net(), optimizer_of(make_net()))


def test_changed_param_groups_are_refused(pair: Pair) -> None:
    pair.released.param_groups[0]["params"].reverse()
    with pytest.raises(RuntimeError, match="no longer where it was when gradients were released"):
        loss_of(pair.models[0], make_batch(0)).backward()


def test_errors_name_the_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 4, sparse=True))
    optimizer = shardopt.AdamW8bit(model.parameters())
    shardopt.release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match=r"parameter 2 of param group 0 \(3, 4\): got a sparse gradient"):
        model[1](torch.tensor([1])).sum().backward()
    assert not optimizer.state
