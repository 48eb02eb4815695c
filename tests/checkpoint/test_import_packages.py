"""Import from the packages themselves, where they are installed: codes, decoded moments and hyper-parameters."""

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
from helpers import through_a_file
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


def assert_taken(ours: ShardedOptimizer, rule: str, decoded: list[list[Tensor]], exact: list[bool]) -> None:
    """Demands the package's own moments where they are taken over exactly, and its hyper-parameters."""
    for found, moments, is_exact in zip(moments_of(ours), decoded, exact, strict=True):
        assert not is_exact or all(map(torch.equal, found.values(), moments))
    assert {name: ours.param_groups[0][name] for name in HYPER[rule]} == HYPER[rule]


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
    assert_taken(ours, rule, decoded, exact)


def of_bitsandbytes(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """The moments of each parameter, decoded by bitsandbytes."""
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
                moments.append(state[f"state{i}"][part])
        found.append(moments)
    return found


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
        [x.dequantize().float() if hasattr(x, "codes") else x for x in (state["exp_avg"], state["exp_avg_sq"])]
        for state in theirs.state.values()
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
    assert_taken(ours, "AdamW", decoded, exact)
