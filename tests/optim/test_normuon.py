"""Rows normalized by second moments (NorMuon): the formulas and the state."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
import shardopt.checkpoint
from helpers import Shape, everything
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.kernels.newton_schulz import QUINTIC, NewtonSchulz
from step_problem import advance, assert_equal, gradient, params_of, start
from step_problem import make_muon as make

#: For steps of formulas: wide, tall, square.
MATRICES: tuple[Shape, ...] = ((40, 130), (97, 64), (64, 64))
STEPS = 3
LONG = 30
NEWTON_SCHULZ = NewtonSchulz((QUINTIC,) * 5, 1e-7)


def normuon(**options: Any) -> shardopt.ShardedOptimizer:
    return make(normalize="rows", **options)


def uneven(shape: Shape, step: int, index: int) -> Tensor:
    """A gradient whose rows differ in size, as those that get one rarely."""
    rows = torch.logspace(-2, 1, shape[0]).unsqueeze(1)
    return values(shape, 100 * (step + 1) + index, torch.float32) * rows


def test_formulas() -> None:
    """Each output's row is divided by the root of its second moment; the matrix keeps its norm.

    Our results are rounded to bfloat16 for their way back, by at most 2^-8 of an element; other roundings are those of
    float32: two of the weight, and as many of a row's sum as it has elements.
    """
    ours, theirs = ([Parameter(values(shape, index)) for index, shape in enumerate(MATRICES)] for _ in range(2))
    optimizer = shardopt.NorMuon(ours, lr=0.02, weight_decay=0.1)
    momentum, bounds = ([torch.zeros_like(param) for param in theirs] for _ in range(2))
    second = [torch.zeros(len(param), 1, dtype=torch.float64) for param in theirs]
    for number in range(LONG):
        gradients = [uneven(shape, number, index) for index, shape in enumerate(MATRICES)]
        for param, given in zip(ours, gradients, strict=True):
            param.grad = given.clone()
        optimizer.step()
        for one, other, g, m, v, bound in zip(ours, theirs, gradients, momentum, second, bounds, strict=True):
            m.lerp_(g, 0.05)
            o = NEWTON_SCHULZ(g.lerp(m, 0.95).bfloat16()).double()
            v += 0.05 * (o.square().mean(1, keepdim=True) - v)
            normed = o / v.sqrt()
            normed *= o.norm() / normed.norm()
            (rows, cols), old = other.shape, other.detach().clone()
            scale = math.sqrt(max(1.0, rows / cols))
            other.data = (other * (1 - 0.02 * 0.1) - 0.02 * scale * normed).float()
            moments, expected = optimizer.state[one]["second_momentum_buffer"], v.float()
            assert bool(((moments - expected).abs() <= (cols + LONG) * 2.0**-24 * expected).all())
            moved = (other.detach() - old * (1.0 - 0.02 * 0.1)).abs()
            bound += moved * (2.0**-8 + cols * 2.0**-23) + 2.0**-22 * (old.abs() + other.detach().abs())
            assert bool(((one - other).abs() <= bound).all())
    # The state as the authors' code keeps it goes on here.
    entries = zip(momentum, (v.float() for v in second), strict=True)
    state = {i: {"momentum_buffer": m, "second_momentum_buffer": v} for i, (m, v) in enumerate(entries)}
    fresh = shardopt.NorMuon8bit([Parameter(param.detach().clone()) for param in theirs])
    group = {"params": list(state), "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "beta2": 0.95}
    fresh.load_state_dict({"state": state, "param_groups": [group]})
    for param, given in zip(params_of(fresh), state.values(), strict=True):
        assert torch.equal(fresh.state[param]["second_momentum_buffer"], given["second_momentum_buffer"])


def test_zeros_stay() -> None:
    """A row, and a matrix, whose gradient is always zero."""
    params = [Parameter(values((8, 40), index)) for index in range(2)]
    optimizer = shardopt.NorMuon(params, lr=0.1, weight_decay=0.0)
    before = [param.detach().clone() for param in params]
    for step in range(STEPS):
        params[0].grad = gradient((8, 40), step, 0)
        params[0].grad[3] = 0.0
        params[1].grad = torch.zeros(8, 40)
        optimizer.step()
    assert torch.equal(params[0][3], before[0][3])
    assert torch.equal(params[1], before[1])
    assert bool(torch.isfinite(params[0]).all())
    assert not torch.equal(params[0], before[0])


def test_a_class_of_its_own_goes_on_after_a_state_dict() -> None:
    """As it is, and dequantized: the next steps have the bits of a run that went on."""
    for given, codec in (({}, "log8"), ({"dequantize": True}, "fp32")):
        fresh, went_on = (shardopt.NorMuon8bit(start(), lr=0.02, min_quantized_numel=64, codec=codec) for _ in range(2))
        optimizer = advance(normuon(codec=codec), range(STEPS))
        assert_equal(advance(went_on, range(STEPS)), optimizer)
        for param, own in zip(params_of(fresh), params_of(optimizer), strict=True):
            param.data.copy_(own.detach())
        fresh.load_state_dict(optimizer.state_dict(**given))
        assert_equal(advance(fresh, range(STEPS, STEPS + 2)), advance(went_on, range(STEPS, STEPS + 2)))


def test_state_without_second_moments() -> None:
    """Begins with zeros where the state is torch's, and is refused where it is ours."""
    plain = advance(make(), range(STEPS))
    assert "second_momentum_buffer" not in everything(plain)
    of_torch, ours = plain.state_dict(dequantize=True), plain.state_dict()
    for group in (*of_torch["param_groups"], *ours["param_groups"]):
        del group["normalize"]
    optimizer = normuon()
    with pytest.raises(ValueError, match=r"got state with .*, expected .*second_momentum_buffer"):
        optimizer.load_state_dict(ours)
    optimizer.load_state_dict(of_torch)
    assert not any(optimizer.state[param]["second_momentum_buffer"].any() for param in params_of(optimizer))
    state = advance(normuon(), range(1)).state_dict()["state"]
    with pytest.raises(ValueError, match="got state with second_momentum_buffer, expected"):
        make().load_state_dict({"state": state, "param_groups": ours["param_groups"]})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x.neg(), "got second_momentum_buffer that stands for NaN, Inf or numbers below zero"),
        (lambda x: x.double(), "got second_momentum_buffer of torch.float64, expected torch.float32"),
        (lambda x: x.T, "got second_momentum_buffer as"),
    ],
)
def test_damaged_state(spoil: Any, message: str) -> None:
    optimizer = advance(normuon(), range(1))
    state = optimizer.state_dict()
    state["state"][1] = dict(state["state"][1])
    state["state"][1]["second_momentum_buffer"] = spoil(state["state"][1]["second_momentum_buffer"])
    before = everything(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_same(everything(optimizer), before)


def test_changes_between_steps_are_seen() -> None:
    """Of the moments in ``state``, and of their decay rate."""
    untouched, replaced, forgets = (advance(normuon(), range(2)) for _ in range(3))
    state = replaced.state[params_of(replaced)[0]]
    state["second_momentum_buffer"] = torch.full_like(state["second_momentum_buffer"], 0.25)
    forgets.param_groups[0]["beta2"] = 0.0  # this step's rows alone
    found = [everything(advance(each, range(2, 3))) for each in (untouched, replaced, forgets)]
    for name in ("0", "0/second_momentum_buffer"):
        assert not any(torch.equal(found[0][name], other[name]) for other in found[1:])


def test_conversion_keeps_second_moments(tmp_path: Path) -> None:
    model = torch.nn.ParameterList([Parameter(values((2, 40, 301), 0)), Parameter(values((40, 130), 1))])
    groups = [{"params": [model[0]], "split": "each"}, {"params": [model[1]]}]
    optimizer = shardopt.NorMuon8bit(groups, lr=0.02)
    for param in model:
        param.grad = values(tuple(param.shape), 7)
    optimizer.step()
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    fresh = shardopt.NorMuon8bit(
        [{"params": [model[0]], "split": "each"}, {"params": [model[1]]}], lr=0.02, codec="dynamic8"
    )
    assert len(shardopt.checkpoint.load(tmp_path, model, fresh, convert=True).converted) == 2
    for param in model:
        taken, given = (each.state[param]["second_momentum_buffer"] for each in (fresh, optimizer))
        assert_same({"moments": taken}, {"moments": given})


def test_an_overflow_does_not_stay_in_the_second_moments() -> None:
    """A finite gradient whose direction overflows leaves the weights as they are, and later steps move all of them."""
    param = Parameter(torch.zeros(4, 16))
    optimizer = shardopt.NorMuon([param], lr=0.1, momentum=0.0, weight_decay=0.0, codec="fp32")
    for step in range(4):
        param.grad = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        if step == 1:
            param.grad[1] = 3.4e38
        before = param.detach().clone()
        optimizer.step()
        assert bool((param != before).all()) == (step != 1)
    assert bool(optimizer.state[param]["second_momentum_buffer"].isfinite().all())
    other = shardopt.NorMuon([Parameter(torch.zeros(4, 16))], lr=0.1, momentum=0.0, weight_decay=0.0, codec="fp32")
    other.load_state_dict(optimizer.state_dict())
