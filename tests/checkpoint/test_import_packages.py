"""Import from the packages themselves, where they are installed, and the next step compared with theirs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardopt
from foreign_states import ALIGNED, MATRICES, OTHERS, SHAPES, assert_imported, moments_of, params_of, stepped
from helpers import through_a_file, with_gradient
from ranks.layouts import values
from shardopt.checkpoint import import_state
from shardopt.optim import ShardedOptimizer

HYPER: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "Lion": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "RMSprop": {"lr": 1e-2, "alpha": 0.9, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2, "weight_decay": 0.1},
    "AdEMAMix": {"lr": 1e-2, "betas": (0.9, 0.99, 0.999), "alpha": 4.0, "weight_decay": 0.1},
}
#: Roundings of float32 in a step of AdamW, the longest: a moment 4, its root and the sum with eps 4, quotient and
#: product 2, decay and difference 2; in each of the two implementations.
ROUNDINGS = 2 * 12


def go_on(
    theirs: torch.optim.Optimizer, ours: ShardedOptimizer, decoded: list[list[Tensor]], exact: list[bool]
) -> None:
    """Takes the next step with both, and compares the parameters whose moments are the same.

    Parameters and gradients have the signs of the first moment, so that nothing cancels in any sum.
    """
    pairs = list(zip(theirs.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True))
    before = []
    for index, ((their_param, our_param), moments) in enumerate(zip(pairs, decoded, strict=True)):
        signs = torch.where(moments[0] < 0, -1.0, 1.0)
        for moment in moments[1:-1]:  # AdEMAMix's slow average
            signs = torch.where(moment * signs < 0, torch.nan, signs)
        before.append(signs.abs() * their_param.detach().abs() * signs)
        for param in (their_param, our_param):
            param.data.copy_(before[-1].nan_to_num(0.0))
            gradient = values(tuple(param.shape), 900 + index).abs() * signs.nan_to_num(1.0)
            with_gradient(param, gradient)
        if exact[index]:
            assert all(torch.equal(a, b) for a, b in zip(moments_of(ours)[index].values(), moments, strict=True))
    theirs.step()
    ours.step()
    for (their_param, our_param), start, is_exact in zip(pairs, before, exact, strict=True):
        there, here = their_param.detach().double(), our_param.detach().double()
        allowed = ROUNDINGS * 2**-24 * (start.abs() + (there - start).abs())
        assert not is_exact or ((here - there).abs() <= allowed)[start.isfinite()].all(), tuple(our_param.shape)


BITSANDBYTES = [
    *((f"{rule}8bit", *codec) for rule in HYPER for codec in (("dynamic8", 256), ("fp32", 128))),
    *((name, "dynamic8", 256) for name in ("PagedAdamW8bit", "PagedAdEMAMix", "AdamW32bit")),
    *(("AdamW8bit", *codec) for codec in (("dynamic8", 128), ("log8", 128))),
]


@pytest.mark.filterwarnings("ignore:Paged")
@pytest.mark.parametrize(("name", "codec", "block_size"), BITSANDBYTES)
def test_bitsandbytes_itself(name: str, codec: str, block_size: int) -> None:
    package = pytest.importorskip("bitsandbytes")
    rule = re.sub("^Paged|8bit$|32bit$", "", name)
    theirs = getattr(package.optim, name)(params_of(), **HYPER[rule])
    stepped(theirs)
    start = {"momentum": 0.5} if rule == "SGD" else {}
    ours = getattr(shardopt, f"{rule}8bit")(params_of(), codec=codec, block_size=block_size, **start)
    report = import_state(ours, through_a_file(theirs.state_dict()))
    decoded = of_bitsandbytes(theirs)
    codes_are_ours = codec == "dynamic8" and block_size == 256 and rule in ("AdamW", "Lion", "SGD") and "8bit" in name
    exact = [codec == "fp32" or shape in OTHERS or (codes_are_ours and shape in ALIGNED[256]) for shape in SHAPES]
    assert [outcome in ("exact", "as float32") for outcome in report.parameters.values()] == exact
    assert report.ignored == ()
    go_on(theirs, ours, decoded, exact)


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
    """Optimizers without 8 bits are named by one line for all of them."""
    package = pytest.importorskip("bitsandbytes")
    named = set(re.findall(r"`(\w+)`", (Path(__file__).parents[2] / "docs" / "bitsandbytes.md").read_text()))
    names = {name for name in vars(package.optim) if name[0].isupper()} - named
    assert {f"{name.removesuffix('32bit')}8bit" for name in names} <= named


@pytest.mark.parametrize(
    ("name", "codec", "block_size"),
    [("AdamW8bit", "dynamic8", 256), ("AdamW8bit", "log8", 128), ("AdamW4bit", "log8", 128), ("AdamWFp8", "log8", 128)],
)
def test_torchao_itself(monkeypatch: pytest.MonkeyPatch, name: str, codec: str, block_size: int) -> None:
    package = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # half a minute for the same arithmetic
    theirs = getattr(package, name)(params_of(), **HYPER["AdamW"])
    stepped(theirs)
    ours = shardopt.AdamW8bit(params_of(), codec=codec, block_size=block_size)
    report = import_state(ours, through_a_file(theirs.state_dict()) if name == "AdamW8bit" else theirs.state_dict())
    decoded = [
        [x.dequantize().float() if hasattr(x, "codes") else x.clone() for x in (state["exp_avg"], state["exp_avg_sq"])]
        for state in theirs.state.values()  # the next step changes it
    ]
    assert report.source == "torchao"
    assert report.ignored == ()
    if name != "AdamW8bit":
        assert_imported(ours, decoded, set())
        return
    coded = [shape in MATRICES and math.prod(shape) % 256 == 0 for shape in SHAPES]
    exact = [
        shape in OTHERS or (codec == "dynamic8" and there and shape in ALIGNED[256])
        for shape, there in zip(SHAPES, coded, strict=True)
    ]
    assert [outcome == "exact" for outcome in report.parameters.values()] == exact
    go_on(theirs, ours, decoded, exact)
