"""Import from the packages themselves, where they are installed, and the next step compared with theirs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardopt
from foreign_states import ALIGNED, MATRICES, OTHERS, SHAPES, STEP, assert_imported, params_of, specification, stepped
from helpers import everything, through_a_file, with_gradient
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.checkpoint import import_state
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


def rmsprop_step(moments: list[Tensor], p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    lr, alpha, eps, decay = 1e-2, 0.9, 1e-8, 0.1
    return squares_step(moments[0], p, g + decay * p, g.abs() + decay * p.abs(), lr, alpha, 1 - alpha, eps)


def adagrad_step(moments: list[Tensor], p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    lr, eps, decay = 1e-2, 1e-10, 0.1
    return squares_step(moments[0], p, g + decay * p, g.abs() + decay * p.abs(), lr, 1.0, 1.0, eps)


def squares_step(
    v: Tensor, p: Tensor, g: Tensor, sizes: Tensor, lr: float, kept: float, added: float, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradient counts twice, as its rounding goes into the root, too: where it cancels, by the size of its sum."""
    denominator = (kept * v + added * g * g).sqrt() + eps
    return p - lr * g / denominator, p.abs() + 2 * lr * sizes / denominator


def ademamix_step(moments: list[Tensor], p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    lr, (b1, b2, b3), alpha, eps, decay, t = 1e-2, (0.9, 0.99, 0.999), 4.0, 1e-8, 0.1, STEP + 1
    fast, slow, v = moments
    denominator = ((b2 * v + (1 - b2) * g * g) / (1 - b2**t)).sqrt() + eps
    mixed = (b1 * fast + (1 - b1) * g) / (1 - b1**t) + alpha * (b3 * slow + (1 - b3) * g)
    sizes = (b1 * fast.abs() + (1 - b1) * g.abs()) / (1 - b1**t) + alpha * (b3 * slow.abs() + (1 - b3) * g.abs())
    return p - lr * decay * p - lr * mixed / denominator, p.abs() + lr * sizes / denominator


PEER_RULES = {
    "AdamW": Rule(2, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}, adamw_step),
    "Lion": Rule(1, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}, lion_step),
    "SGD": Rule(1, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}, sgd_step),
    "RMSprop": Rule(1, {"lr": 1e-2, "alpha": 0.9, "weight_decay": 0.1}, rmsprop_step),
    "Adagrad": Rule(1, {"lr": 1e-2, "weight_decay": 0.1}, adagrad_step),
    "AdEMAMix": Rule(3, {"lr": 1e-2, "betas": (0.9, 0.99, 0.999), "alpha": 4.0, "weight_decay": 0.1}, ademamix_step),
}


def go_on(
    theirs: torch.optim.Optimizer, ours: ShardedOptimizer, decoded: list[list[Tensor]], rule: Rule, exact: list[bool]
) -> None:
    """Takes the next step with both and compares the parameters.

    The parameters may differ by the rounding of float32 and by what the step of ``rule``, in float64, makes of the
    difference of their moments, which is nothing where codes were taken over.
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


@pytest.mark.parametrize(("codec", "block_size"), [("dynamic8", 256), ("dynamic8", 128), ("log8", 128), ("fp32", 128)])
@pytest.mark.parametrize("rule", PEER_RULES)
def test_bitsandbytes_itself(rule: str, codec: str, block_size: int) -> None:
    package = pytest.importorskip("bitsandbytes")
    theirs = getattr(package.optim, f"{rule}8bit")(params_of(), **PEER_RULES[rule].hyper)
    stepped(theirs)
    start = {"momentum": 0.5} if rule == "SGD" else {}
    ours = getattr(shardopt, f"{rule}8bit")(params_of(), codec=codec, block_size=block_size, **start)
    report = import_state(ours, through_a_file(theirs.state_dict()))
    decoded = of_bitsandbytes(theirs)
    codes_are_ours = codec == "dynamic8" and block_size == 256 and rule in ("AdamW", "Lion", "SGD")
    exact = [codec == "fp32" or shape in OTHERS or (codes_are_ours and shape in ALIGNED[256]) for shape in SHAPES]
    outcomes = list(report.parameters.values())
    assert [outcome in ("exact", "as float32") for outcome in outcomes] == exact
    assert report.ignored == ()
    go_on(theirs, ours, decoded, PEER_RULES[rule], exact)


def of_bitsandbytes(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """The moments of each parameter, decoded by bitsandbytes, in memory of their own: the next step changes it."""
    dequantize = pytest.importorskip("bitsandbytes").functional.dequantize_blockwise
    stacked = len(optimizer.param_groups[0]["betas"]) == 3
    places = [(1, 0), (1, 1), (2, ...)] if stacked else [(1, ...), (2, ...)]
    found = []
    for state in optimizer.state.values():
        moments: list[Tensor] = []
        for i, part in places:
            if f"absmax{i}" in state:
                codes, absmax = state[f"state{i}"][part].contiguous(), state[f"absmax{i}"][part]
                moments.append(dequantize(codes, absmax=absmax, code=state[f"qmap{i}"], blocksize=256))
            elif f"state{i}" in state:
                moments.append(state[f"state{i}"][part].clone())
        found.append(moments)
    return found


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW32bit", "Lion8bit", "AdEMAMix8bit", "AdEMAMix"])
def test_paged_optimizers_of_bitsandbytes(name: str) -> None:
    """On the CPU they warn, and are the others."""
    package = pytest.importorskip("bitsandbytes")
    found = []
    for prefix in ("", "Paged"):
        theirs = getattr(package.optim, prefix + name)(params_of(), lr=1e-2)
        with pytest.warns(UserWarning, match="Paged") if prefix else nullcontext():
            stepped(theirs)
        ours = getattr(shardopt, name.removesuffix("32bit"))(params_of(), codec="dynamic8", block_size=256)
        report = import_state(ours, theirs.state_dict())
        for param, moments in zip(ours.param_groups[0]["params"], of_bitsandbytes(theirs), strict=True):
            if tuple(param.shape) in OTHERS:
                mine = specification(ours, param).decode(ours.state[param]).values()
                assert [torch.equal(*both) for both in zip(mine, moments, strict=True)] == [True] * len(moments)
        found.append((report, everything(ours)))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize(("theirs", "same", "hyper"), [("LAMB", "Adam", {}), ("LARS", "SGD", {"momentum": 0.9})])
def test_lamb_and_lars_of_bitsandbytes(theirs: str, same: str, hyper: dict[str, Any]) -> None:
    """With 8 bits their steps are those of Adam and SGD: not for small parameters, whose state has 32."""
    package = pytest.importorskip("bitsandbytes")
    limited, plain = (
        getattr(package.optim, f"{name}8bit")(params_of(), lr=1e-2, weight_decay=0.1, **hyper)
        for name in (theirs, same)
    )
    stepped(limited)
    stepped(plain)
    are_same = [
        torch.equal(*both) for both in zip(*(o.param_groups[0]["params"] for o in (limited, plain)), strict=True)
    ]
    assert [shape for shape, same in zip(SHAPES, are_same, strict=True) if not same] == [(7,), ()]
    ours = getattr(shardopt, f"{same.replace('Adam', 'AdamW')}8bit")(params_of(), **hyper)
    report = import_state(ours, limited.state_dict())
    assert report.ignored == tuple(f"unorm_vec of parameter {index} of param group 0" for index in range(len(SHAPES)))
    in_32_bits = getattr(package.optim, f"{theirs}32bit")(params_of(), lr=1e-2, **hyper)
    stepped(in_32_bits)
    with pytest.raises(ValueError, match="LAMB or LARS in 32 bits"):
        import_state(ours, in_32_bits.state_dict())


def test_the_page_names_every_optimizer_of_bitsandbytes() -> None:
    package = pytest.importorskip("bitsandbytes")
    named = set(re.findall(r"`(\w+)`", (Path(__file__).parents[2] / "docs" / "bitsandbytes.md").read_text()))
    assert {name for name in vars(package.optim) if name[0].isupper()} <= named


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
