"""Rows normalized by second moments (NorMuon): the formulas, the authors' code, and the state."""

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
from muon_problem import STEPS, advance, assert_equal, gradient, make, params_of, start
from ranks.layouts import values
from ranks.offload import late_transfers, offload_from_cpu
from ranks.snapshot import assert_same
from shardopt.kernels.newton_schulz import QUINTIC, NewtonSchulz

#: For 100 steps of formulas: wide, tall, square.
MATRICES: tuple[Shape, ...] = ((40, 130), (97, 64), (64, 64))
LONG = 100
HYPER = {"lr": 0.02, "weight_decay": 0.1}
NEWTON_SCHULZ = NewtonSchulz((QUINTIC,) * 5, 1e-7)


def normuon(**options: Any) -> shardopt.ShardedOptimizer:
    return make(normalize="rows", **options)


def uneven(shape: Shape, step: int, index: int) -> Tensor:
    """A gradient whose rows differ in size, as those that get one rarely."""
    rows = torch.logspace(-2, 1, shape[0]).unsqueeze(1)
    return values(shape, 100 * (step + 1) + index, torch.float32) * rows


def compare(theirs: list[Parameter], state: Any, step: Any) -> None:
    """Compares 100 steps with another implementation whose ``step`` takes the gradients' step number.

    Our results are rounded to bfloat16 for their way back, by at most 2^-8 of an element; other roundings are those of
    float32: two of the weight, and as many of a row's sum as it has elements.
    """
    ours = [Parameter(param.detach().clone()) for param in theirs]
    optimizer = shardopt.NorMuon(ours, **HYPER)
    bounds = [torch.zeros_like(param) for param in theirs]
    for number in range(LONG):
        before = [param.detach().clone() for param in theirs]
        for index, param in enumerate(ours):
            param.grad = uneven(tuple(param.shape), number, index)
        optimizer.step()
        step(number)
        for one, other, old, bound in zip(ours, theirs, before, bounds, strict=True):
            cols = other.shape[1]
            moments, expected = optimizer.state[one]["second_momentum_buffer"], state(other)
            assert moments.shape == expected.shape == (other.shape[0], 1)
            assert bool(((moments - expected).abs() <= (cols + 100) * 2.0**-24 * expected).all())
            moved = (other.detach() - old * (1.0 - HYPER["lr"] * HYPER["weight_decay"])).abs()
            bound += moved * (2.0**-8 + cols * 2.0**-23) + 2.0**-22 * (old.abs() + other.detach().abs())
            assert bool(((one - other).abs() <= bound).all())


def test_formulas() -> None:
    """Each output's row is divided by the root of its second moment; the matrix keeps its norm."""
    params = [Parameter(values(shape, index)) for index, shape in enumerate(MATRICES)]
    momentum = {param: torch.zeros_like(param) for param in params}
    moments = {param: torch.zeros(len(param), dtype=torch.float64) for param in params}

    def step(number: int) -> None:
        for index, param in enumerate(params):
            g = uneven(tuple(param.shape), number, index)
            momentum[param].lerp_(g, 0.05)
            o = NEWTON_SCHULZ(g.lerp(momentum[param], 0.95).bfloat16()).double()
            for row in range(len(o)):
                moments[param][row] += 0.05 * (o[row].square().mean() - moments[param][row])
            normed = o / moments[param].sqrt().unsqueeze(1)
            normed *= o.norm() / normed.norm()
            scale = math.sqrt(max(1.0, param.shape[0] / param.shape[1]))
            param.data = (param * (1 - 0.02 * 0.1) - 0.02 * scale * normed).float()

    compare(params, lambda param: moments[param].float().unsqueeze(1), step)


def test_authors_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, as before its commit 939267f: later the code steps bfloat16 parameters alone.

    The iteration is ours in both, as its bfloat16 products are rounded at other places there.
    """
    authors = pytest.importorskip("normuon", reason="github.com/zichongli5/NorMuon is not installed")
    monkeypatch.setattr(
        authors, "zeropower_via_newtonschulz5", lambda g, steps: NEWTON_SCHULZ(g.bfloat16().clone()).float()
    )
    params = [Parameter(values(shape, index)) for index, shape in enumerate(MATRICES)]
    optimizer = authors.SingleDeviceNorMuon(params, **HYPER)

    def step(number: int) -> None:
        for index, param in enumerate(params):
            param.grad = uneven(tuple(param.shape), number, index)
        optimizer.step()

    compare(params, lambda param: optimizer.state[param]["second_momentum_buffer"], step)
    ours = shardopt.NorMuon8bit([Parameter(param.detach().clone()) for param in params], **HYPER)
    ours.load_state_dict(optimizer.state_dict())
    for mine, their in zip(params_of(ours), params, strict=True):
        taken, given = (each.state[p]["second_momentum_buffer"] for each, p in ((ours, mine), (optimizer, their)))
        assert_same({"moments": taken}, {"moments": given})


def test_a_class_of_its_own() -> None:
    classes = (shardopt.NorMuon8bit(start(), **{"lr": 0.02, "min_quantized_numel": 64}), normuon())
    assert_equal(*(advance(optimizer, range(STEPS)) for optimizer in classes))
    assert shardopt.NorMuon(start()).param_groups[0]["codec"] == "fp32"
    assert "second_momentum_buffer" not in everything(advance(make(), range(1)))


@pytest.mark.parametrize("split", [(10, 17, 13), "each"])
def test_matrices_in_one_parameter(split: Any) -> None:
    """The rows of each, with the bits that the matrices have alone."""
    shape = (40, 130) if isinstance(split, tuple) else (3, 11, 70)
    whole = Parameter(values(shape, 0))
    rows = split if isinstance(split, tuple) else (1,) * len(whole)
    apart = [Parameter(part.squeeze(0) if split == "each" else part) for part in whole.detach().clone().split(rows)]
    options = {"lr": 0.02, "codec": "fp32"}
    together = shardopt.NorMuon(params_for(whole), split=split, **options)
    alone = shardopt.NorMuon(apart, **options)
    for step in range(STEPS):
        whole.grad = gradient(shape, step, 0)
        for param, part in zip(apart, whole.grad.split(rows), strict=True):
            param.grad = part.reshape(param.shape).clone()
        together.step()
        alone.step()
    moments = torch.cat([alone.state[param]["second_momentum_buffer"].flatten() for param in apart])
    got = {"weights": whole.detach().flatten(), "moments": together.state[whole]["second_momentum_buffer"].flatten()}
    assert_same(got, {"weights": torch.cat([param.detach().flatten() for param in apart]), "moments": moments})


def params_for(param: Parameter) -> list[Parameter]:
    return [param]


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


def test_state_dict() -> None:
    """As it is, and dequantized: the next steps have the bits of a run that went on."""
    for given, options in (({}, {}), ({"dequantize": True}, {"codec": "fp32"})):
        optimizer, other = (advance(normuon(**options), range(STEPS)) for _ in range(2))
        fresh = normuon(**options)
        for param, own in zip(params_of(fresh), params_of(optimizer), strict=True):
            param.data.copy_(own.detach())
        fresh.load_state_dict(optimizer.state_dict(**given))
        assert_equal(advance(fresh, range(STEPS, STEPS + 2)), advance(other, range(STEPS, STEPS + 2)))


def test_state_without_second_moments() -> None:
    """Begins with zeros where the state is torch's, and is refused where it is ours."""
    plain = advance(make(), range(STEPS))
    of_torch = plain.state_dict(dequantize=True)
    ours = plain.state_dict()
    for group in (*of_torch["param_groups"], *ours["param_groups"]):
        del group["normalize"]
    optimizer = normuon()
    with pytest.raises(ValueError, match=r"got state with .*, expected .*second_momentum_buffer"):
        optimizer.load_state_dict(ours)
    optimizer.load_state_dict(of_torch)
    assert not any(optimizer.state[param]["second_momentum_buffer"].any() for param in params_of(optimizer))
    with pytest.raises(ValueError, match="got state with second_momentum_buffer, expected"):
        make().load_state_dict({**normuon_state(), "param_groups": ours["param_groups"]})


def normuon_state() -> dict[str, Any]:
    state: dict[str, Any] = advance(normuon(), range(1)).state_dict()
    return state


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x.neg(), "got second_momentum_buffer that stands for NaN, Inf or numbers below zero"),
        (lambda x: x * math.nan, "got second_momentum_buffer that stands for NaN"),
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


def test_replaced_state_is_seen() -> None:
    optimizer, other = (advance(normuon(), range(2)) for _ in range(2))
    for each in (optimizer, other):
        state = each.state[params_of(each)[0]]
        state["second_momentum_buffer"] = torch.full_like(state["second_momentum_buffer"], 0.25)
    assert_equal(advance(optimizer, range(2, 4)), advance(other, range(2, 4)))
    untouched = advance(normuon(), range(4))
    assert not torch.equal(params_of(optimizer)[0], params_of(untouched)[0])


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


def test_another_decay_between_steps() -> None:
    optimizers = [advance(normuon(), range(2)) for _ in range(2)]
    optimizers[0].param_groups[0]["beta2"] = 0.0  # this step's rows alone
    for optimizer in optimizers:
        advance(optimizer, range(2, 3))
    param = params_of(optimizers[0])[0]
    moments, others = (optimizer.state[params_of(optimizer)[0]]["second_momentum_buffer"] for optimizer in optimizers)
    assert not torch.equal(moments, others)
    assert not torch.equal(param, params_of(optimizers[1])[0])


def test_normalized_from_now_on_is_refused() -> None:
    optimizer = advance(make(), range(1))
    before = everything(optimizer)
    optimizer.param_groups[0]["normalize"] = "rows"
    with pytest.raises(RuntimeError, match="got state without second_momentum_buffer"):
        advance(optimizer, range(1, 2))
    assert_same(everything(optimizer), before)


@pytest.mark.parametrize("options", [{}, {"codec": "fp32"}, {"memory": 1}], ids=str)
def test_offloaded_state(options: dict[str, Any]) -> None:
    expected = advance(normuon(**options), range(STEPS))
    with offload_from_cpu(4096, late_transfers("state")):
        got = advance(normuon(offload="state", **options), range(STEPS))
        got.synchronize()
        assert_equal(got, expected)


def test_bytes() -> None:
    """A float32 per row: what a report and an estimate count, too."""
    param = Parameter(values((256, 512), 0))
    optimizer = shardopt.NorMuon8bit([param])
    param.grad = values((256, 512), 1)
    optimizer.step()
    use = shardopt.memory_report(optimizer).host
    assert use.state + use.scales == 256 * 512 * (1 + 4 / 128) + 4 * 256 + 4


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
