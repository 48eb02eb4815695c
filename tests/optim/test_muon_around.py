"""Muon in one process: what surrounds a step, storage, saving and loading, memory."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from helpers import CODEC_NAMES, RULES, Shape, everything
from live_bytes import LiveBytes
from muon_problem import OPTIONS, SHAPES, STEPS, advance, assert_equal, gradient, make, params_of, start
from ranks.models import loss_of, make_batch, make_net
from ranks.snapshot import assert_same
from shardopt.kernels.newton_schulz import POLAR_EXPRESS, NewtonSchulz
from shardopt.optim import ShardedOptimizer
from shardopt.step.muon.matrices import padded

# Around a step --------------------------------------------------------------------------------------------------------


def test_waves_change_nothing() -> None:
    """Nor what is in memory: all matrices at once, some, or one parameter at a time."""
    expected = advance(make(codec="log8"), range(STEPS))
    for memory in (1, 60_000, 100_000):
        assert_equal(advance(make(codec="log8", memory=memory), range(STEPS)), expected)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("momentum", 0.5),
        ("lr", 0.3),
        ("lr", torch.tensor(0.3)),
        ("weight_decay", 0.7),
        ("nesterov", False),
        ("ns_steps", 2),
        ("ns_coefficients", "polar_express"),
        ("ns_coefficients", (2.0, -1.5, 0.5)),
        ("eps", 100.0),
        ("adjust_lr_fn", "match_rms_adamw"),
        ("split", (1, 39)),
        ("maximize", True),
        ("nonfinite", "propagate"),
    ],
    ids=str,
)
def test_options_may_change_between_steps(option: str, value: Any) -> None:
    """The next step is that of an optimizer that always had them."""
    shapes = ((40, 130), (40, 9))
    optimizer = advance(make(shapes=shapes), range(2))
    other = make(shapes=shapes, **{option: value})
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][option] = value
    other.load_state_dict(state)
    for mine, theirs in zip(params_of(optimizer), params_of(other), strict=True):
        theirs.data.copy_(mine)
    optimizer.param_groups[0][option] = value
    before = everything(optimizer)
    assert_equal(advance(optimizer, range(2, 4)), advance(other, range(2, 4)))
    unchanged = advance(make(shapes=shapes), range(4))
    if option != "nonfinite":
        assert any(not torch.equal(x, y) for x, y in zip(params_of(optimizer), params_of(unchanged), strict=True))
    assert any(not torch.equal(value, everything(optimizer)[name]) for name, value in before.items())


def test_algorithm_changed_between_steps_is_refused_or_steps() -> None:
    """A matrix that AdamW is to step lacks AdamW's state: an error, and nothing is changed."""
    optimizer = advance(make(), range(1))
    before = everything(optimizer)
    optimizer.param_groups[0]["algorithm"] = "adamw"
    with pytest.raises(RuntimeError, match="got state without exp_avg"):
        advance(optimizer, range(1, 2))
    assert_same(everything(optimizer), before)


def test_maximize_is_the_negated_gradient() -> None:
    """Signs are exact everywhere, so that bits are equal."""
    got, expected = make(maximize=True), make()
    for step in range(STEPS):
        for optimizer, sign in ((got, 1), (expected, -1)):
            for index, param in enumerate(params_of(optimizer)):
                param.grad = sign * gradient(tuple(param.shape), step, index)
            optimizer.step()
    assert_equal(got, expected)


def test_autocast_changes_nothing() -> None:
    optimizers = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            optimizers.append(advance(make(), range(1)))
    assert_equal(*optimizers)


def test_tensor_learning_rate_is_read_in_each_step() -> None:
    lr = torch.tensor(0.02, dtype=torch.float64)
    got, expected = make(lr=lr), make(lr=0.02)
    for step, value in enumerate((0.02, 0.5, 0.125)):
        lr.fill_(value)
        expected.param_groups[0]["lr"] = value
        for optimizer in (got, expected):
            advance(optimizer, range(step, step + 1))
        assert_equal(got, expected)


@pytest.mark.parametrize("steps", [range(1), range(3)])
def test_grad_scaler(steps: range) -> None:
    """The scaler's factor is divided out; an overflow leaves everything as it was."""
    got, expected = make(), make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=100)
    scaler.scale(torch.ones(()))
    for step in steps:
        advance(expected, range(step, step + 1))
        for index, param in enumerate(params_of(got)):
            param.grad = gradient(tuple(param.shape), step, index) * 2.0**12
        scaler.step(got)
        scaler.update()
        assert_equal(got, expected)
    before = everything(got)
    params_of(got)[0].grad[0, 0] = math.inf
    scaler.step(got)
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert_same(everything(got), before)


def test_accumulated_gradients_and_a_closure() -> None:
    got, expected = make(), make()
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            for index, param in enumerate(params_of(got)):
                param.grad = None
                for part in (0.25, 0.75):  # exact
                    loss = (param * gradient(tuple(param.shape), step, index).round(decimals=1).bfloat16() * part).sum()
                    loss.backward()
            return 7.0

        assert got.step(closure) == 7.0
        for param, other in zip(params_of(got), params_of(expected), strict=True):
            other.grad = param.grad.clone()
        expected.step()
    assert_equal(got, expected)


def test_parameters_without_gradient_stay() -> None:
    """In one step or all; the others are as if alone."""
    optimizer = make()
    alone = shardopt.Muon8bit(start()[1:], **OPTIONS)
    first = params_of(optimizer)[0]
    before = first.detach().clone()
    for step in range(STEPS):
        for of, params in ((optimizer, params_of(optimizer)[1:]), (alone, params_of(alone))):
            for index, param in enumerate(params, 1):
                param.grad = gradient(tuple(param.shape), step, index)
            of.step()
    assert_same({"param": first.detach()}, {"param": before})
    assert first not in optimizer.state or not optimizer.state[first]
    for mine, theirs in zip(params_of(alone), params_of(optimizer)[1:], strict=True):
        assert_same({"param": mine.detach()}, {"param": theirs.detach()})
        assert_same(alone.state[mine], optimizer.state[theirs])
    optimizer.zero_grad()
    first.grad = gradient(SHAPES[0], 0, 0)
    optimizer.step()
    expected = advance(make(shapes=SHAPES[:1]), range(1))
    assert_same({"param": first.detach()}, {"param": params_of(expected)[0].detach()})


def test_no_gradient_at_all() -> None:
    optimizer = make()
    before = everything(optimizer)
    optimizer.step()
    assert_same(everything(optimizer), before)


def test_frozen_matrices_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix without gradient is multiplied."""
    seen: list[Shape] = []
    original = NewtonSchulz.__call__
    monkeypatch.setattr(NewtonSchulz, "__call__", lambda ns, x: seen.append(tuple(x.shape)) or original(ns, x))
    optimizer = make()
    for index in (1, 4):
        params_of(optimizer)[index].grad = gradient(SHAPES[index], 0, index)
    optimizer.step()
    assert sorted(seen) == [(12, 63), (97, 64)]


# Saving and loading ---------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[ShardedOptimizer], ShardedOptimizer]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("steps", [0, 2])
def test_copies_go_on_alike(how: str, steps: int) -> None:
    groups = [{"params": start()}, {"params": start(shapes=((30,),)), "algorithm": "lion"}]
    optimizer = advance(shardopt.Muon8bit(groups, **OPTIONS), range(steps))
    other = COPIES[how](optimizer)
    assert_equal(optimizer, other)
    assert_equal(advance(optimizer, range(steps, 4)), advance(other, range(steps, 4)))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_state_dict_goes_on_alike(codec: str) -> None:
    optimizer, other = advance(make(codec=codec), range(2)), make(codec=codec)
    for mine, theirs in zip(params_of(optimizer), params_of(other), strict=True):
        theirs.data.copy_(mine)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_equal(advance(optimizer, range(2, 4)), advance(other, range(2, 4)))


@pytest.mark.parametrize("to", [None, "fp32", "dynamic8"])
def test_portable_checkpoint(tmp_path: Path, to: str | None) -> None:
    """A model of matrices, embeddings, norms and biases, into another one; and another codec."""

    def trained(seed: int, steps: range, codec: str) -> tuple[nn.Module, ShardedOptimizer]:
        model = make_net(seed=seed)
        optimizer = shardopt.Muon(shardopt.muon_groups(model), min_quantized_numel=64, codec=codec)
        for number in steps:
            turn(model, optimizer, number)
        return model, optimizer

    def turn(model: nn.Module, optimizer: ShardedOptimizer, number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, make_batch(number)).backward()
        optimizer.step()

    model, optimizer = trained(0, range(2), "log8")
    shardopt.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    other, loaded = trained(1, range(0), to or "log8")
    shardopt.checkpoint.load(tmp_path / "checkpoint", other, loaded, convert=to is not None)
    if to is None:
        assert_equal(optimizer, loaded)
        for m, o in ((model, optimizer), (other, loaded)):
            turn(m, o, 2)
        assert_equal(optimizer, loaded)
        return
    expected = shardopt.Muon(shardopt.muon_groups(other), min_quantized_numel=64, codec=to)
    expected.load_state_dict(optimizer.state_dict(dequantize=True))
    assert_equal(loaded, expected)


# Memory ---------------------------------------------------------------------------------------------------------------


def _most_bytes(optimizer: ShardedOptimizer) -> int:
    """The most bytes of new tensors that live at a time during the second step."""
    advance(optimizer, range(1))
    with LiveBytes() as live:
        optimizer.step()
    assert live.now == 0  # nothing is kept until the next step
    return live.most


@pytest.mark.parametrize("memory", [600_000, 700_000, 1_000_000])
def test_memory_is_kept_to(memory: int) -> None:
    """Directions and what is computed of them: more than half of what is allowed, and never more."""
    shapes = ((100, 130), (260, 100)) * 10  # 780,000 bytes of directions
    for normalize in (None, "rows"):
        optimizer = make(shapes=shapes, memory=memory, normalize=normalize)
        assert memory / 2 < _most_bytes(optimizer) <= memory


def test_a_parameter_that_needs_more_is_by_itself() -> None:
    shapes = ((100, 130),) * 6
    one, least = (_most_bytes(make(shapes=some, memory=1)) for some in (shapes[:1], shapes))
    # The one that is computed, the direction that comes next, and the one that was computed before.
    assert one < least <= one + 2 * 2 * padded(100 * 130)


def test_polar_express_is_for_more_steps_than_it_has() -> None:
    """Further steps take the last triple."""
    given = [*POLAR_EXPRESS, POLAR_EXPRESS[-1], POLAR_EXPRESS[-1]]
    options = {"ns_steps": len(given)}
    got, expected = make(ns_coefficients="polar_express", **options), make(ns_coefficients=given, **options)
    assert_equal(advance(got, range(2)), advance(expected, range(2)))


def test_classes() -> None:
    assert shardopt.Muon8bit(start()).param_groups[0]["codec"] == "log8"
    assert issubclass(shardopt.Muon8bit, shardopt.Muon)
    assert "muon" not in RULES
