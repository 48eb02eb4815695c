"""Import from the packages themselves, where they are installed, and the next step compared with theirs."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardopt
from foreign_states import ALIGNED, MATRICES, OTHERS, SHAPES, STEP, assert_imported, params_of, specification, stepped
from helpers import with_gradient
from ranks.layouts import values
from shardopt.checkpoint.foreign import import_state
from shardopt.optim import ShardedOptimizer


class Rule(NamedTuple):
    """One step in float64, from the moments before it, and a bound of what float32 makes of it.

    The bound counts each operand of a sum by itself, so that it holds where they cancel: ``ROUNDINGS`` of a relative
    2**-24 in each of the two implementations.
    """

    moments: int
    hyper: dict[str, Any]
    step: Callable[[list[Tensor], Tensor, Tensor], tuple[Tensor, Tensor]]


#: Of AdamW, the longest: a moment 4, its root and the sum with eps 4, quotient and product 2, decay and difference 2.
ROUNDINGS = 12


def adamw_step(moments: list[Tensor], p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    lr, (b1, b2), eps, decay, t = 1e-2, (0.9, 0.99), 1e-8, 0.1, STEP + 1
    m, v = moments
    correction = 1 - b1**t
    denominator = ((b2 * v + (1 - b2) * g * g) / (1 - b2**t)).sqrt() + eps
    stepped = p - lr * decay * p - lr / correction * (b1 * m + (1 - b1) * g) / denominator
    return stepped, p.abs() + lr / correction * (b1 * m.abs() + (1 - b1) * g.abs()) / denominator


def lion_step(moments: list[Tensor], p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    lr, b1, decay = 1e-2, 0.9, 0.1
    sizes = b1 * moments[0].abs() + (1 - b1) * g.abs()
    direction = b1 * moments[0] + (1 - b1) * g
    undecided = direction.abs() <= ROUNDINGS * 2**-24 * sizes
    stepped = p - lr * decay * p - lr * direction.sign()
    return stepped, p.abs() + lr + torch.where(undecided, 2 * lr / (ROUNDINGS * 2**-24), 0)


def sgd_step(moments: list[Tensor], p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    lr, momentum, decay = 1e-2, 0.9, 0.1
    stepped = p - lr * (momentum * moments[0] + g + decay * p)
    return stepped, p.abs() + lr * (momentum * moments[0].abs() + g.abs() + decay * p.abs())


PEER_RULES = {
    "AdamW": Rule(2, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}, adamw_step),
    "Lion": Rule(1, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}, lion_step),
    "SGD": Rule(1, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}, sgd_step),
}


def go_on(
    theirs: torch.optim.Optimizer, ours: ShardedOptimizer, decoded: list[list[Tensor]], rule: Rule, exact: list[bool]
) -> None:
    """Takes the next step with both and compares the parameters.

    They may differ by the rounding of float32 and by what the step of ``rule``, in float64, makes of the difference of
    their moments, which is nothing where codes were taken over.
    """
    pairs = list(zip(theirs.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True))
    before, mine = [], []
    for (their_param, our_param), moments, same in zip(pairs, decoded, exact, strict=True):
        our_param.data.copy_(their_param.data)
        before.append(their_param.detach().double())
        spec = specification(ours, our_param)
        mine.append(list(spec.decode(ours.state[our_param]).values()))
        if same:
            assert all(torch.equal(a, b) for a, b in zip(mine[-1], moments, strict=True))
    for optimizer in (theirs, ours):
        for index, param in enumerate(optimizer.param_groups[0]["params"]):
            with_gradient(param, values(tuple(param.shape), 900 + index, param.dtype))
        optimizer.step()
    for index, (their_param, our_param) in enumerate(pairs):
        gradient = values(tuple(our_param.shape), 900 + index).double()
        here, bound = rule.step([x.double() for x in mine[index]], before[index], gradient)
        there, their_bound = rule.step([x.double() for x in decoded[index]], before[index], gradient)
        allowed = (here - there).abs() + ROUNDINGS * 2**-24 * (bound + their_bound)
        found = (our_param.detach().double() - their_param.detach().double()).abs()
        assert (found <= allowed).all(), f"{tuple(our_param.shape)}: {(found / allowed).max():.3g} of what is allowed"


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("codec", "block_size"), [("dynamic8", 256), ("dynamic8", 128), ("log8", 128), ("fp32", 128)])
@pytest.mark.parametrize("rule", PEER_RULES)
def test_bitsandbytes_itself(rule: str, codec: str, block_size: int) -> None:
    package = pytest.importorskip("bitsandbytes")
    theirs = getattr(package.optim, f"{rule}8bit")(params_of(), **PEER_RULES[rule].hyper)
    stepped(theirs)
    start = {"momentum": 0.5} if rule == "SGD" else {}
    ours = getattr(shardopt, f"{rule}8bit")(params_of(), codec=codec, block_size=block_size, **start)
    report = import_state(ours, through_a_file(theirs.state_dict()))
    dequantize = package.functional.dequantize_blockwise
    decoded = []
    for state in copy.deepcopy(list(theirs.state.values())):  # the next step changes it
        indices = range(1, PEER_RULES[rule].moments + 1)
        moments = [(state[f"state{i}"], state.get(f"absmax{i}"), state.get(f"qmap{i}")) for i in indices]
        decoded.append(
            [
                codes if absmax is None else dequantize(codes, absmax=absmax, code=qmap, blocksize=256)
                for codes, absmax, qmap in moments
            ]
        )
    exact = [codec == "fp32" or shape in OTHERS or (block_size == 256 and shape in ALIGNED[256]) for shape in SHAPES]
    outcomes = list(report.parameters.values())
    assert [outcome in ("exact", "as float32") for outcome in outcomes] == exact
    assert report.ignored == ()
    go_on(theirs, ours, decoded, PEER_RULES[rule], exact)


@pytest.mark.parametrize(("codec", "block_size"), [("dynamic8", 256), ("log8", 128)])
def test_torchao_itself(monkeypatch: pytest.MonkeyPatch, codec: str, block_size: int) -> None:
    package = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # half a minute for the same arithmetic
    rule = PEER_RULES["AdamW"]
    theirs = package.AdamW8bit(params_of(), **rule.hyper)
    stepped(theirs)
    ours = shardopt.AdamW8bit(params_of(), codec=codec, block_size=block_size)
    report = import_state(ours, through_a_file(theirs.state_dict()))
    decoded = [
        [x.dequantize() if hasattr(x, "codes") else x.clone() for x in (state["exp_avg"], state["exp_avg_sq"])]
        for state in theirs.state.values()  # the next step changes it
    ]
    coded = [shape in MATRICES and math.prod(shape) % 256 == 0 for shape in SHAPES]
    exact = [
        shape in OTHERS or (codec == "dynamic8" and there and shape in ALIGNED[256])
        for shape, there in zip(SHAPES, coded, strict=True)
    ]
    assert [outcome == "exact" for outcome in report.parameters.values()] == exact
    assert report.ignored == ()
    go_on(theirs, ours, decoded, rule, exact)


@pytest.mark.parametrize("name", ["AdamW4bit", "AdamWFp8"])
def test_other_states_of_torchao(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    package = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    theirs = getattr(package, name)(params_of())
    stepped(theirs)
    ours = shardopt.AdamW8bit(params_of())
    report = import_state(ours, theirs.state_dict())
    decoded = [
        [x.dequantize().float() if hasattr(x, "codes") else x for x in (state["exp_avg"], state["exp_avg_sq"])]
        for state in theirs.state.values()
    ]
    assert_imported(ours, decoded, set())
    assert report.source == "torchao"
