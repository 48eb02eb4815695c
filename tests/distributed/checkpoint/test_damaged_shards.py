"""State that is damaged on one rank is refused by all that exchange moments when it is loaded; nothing is changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import shardopt
from helpers import everything
from ranks.pool import Pool
from ranks.runs import step_with, trained
from ranks.snapshot import assert_same
from shardopt.checkpoint import CheckpointError, import_state
from shardopt.optim import ShardedOptimizer
from slow_cases import slow


def _first(state_dict: dict[str, Any], *entries: str) -> tuple[dict[str, Any], str, Tensor]:
    """The first state with one of these entries of which this rank has a part; the entry, and the part."""
    for state in state_dict["state"].values():
        for key in entries:
            if key in state:
                local = state[key].to_local() if isinstance(state[key], DTensor) else state[key]
                if local.numel():
                    return state, key, local
    raise AssertionError(f"no {entries}")


def _damage(state_dict: dict[str, Any], what: str) -> None:
    if what == "lr":
        state_dict["param_groups"][0]["lr"] = math.nan
    elif what == "param groups":
        state_dict["param_groups"] = None
    elif "." not in what:
        state, key, local = _first(state_dict, "exp_avg_scales", "exp_avg")
        if what == "value":
            local.view(-1)[0] = math.nan
        elif what == "step":
            state["step"] = torch.tensor(-5.0)
        else:
            del state[key]


def _raise_out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("out of memory")


def _refused(way: str, source: str, what: str, load: Callable[..., Any] = ShardedOptimizer.load_state_dict) -> str:
    """The error of loading state that the last rank has damaged, or for whose codes or copies it has no memory.

    Args:
        way: of ``WAYS``.
        source: of the state: "ours", "torch", or "momentum", of which the optimizer has none before.
        what: is damaged, or the function of shardopt.state that finds no memory.
        load: takes the optimizer and the state.
    """
    model, optimizer = trained(way, 1, "sgd" if source == "momentum" else "adamw")
    theirs: torch.optim.Optimizer = optimizer
    if source == "torch":
        theirs = torch.optim.AdamW(model.parameters())
        step_with(model, theirs, 1)
    elif source == "momentum":
        _, theirs = trained(way, 1, "momentum")
    state_dict = copy.deepcopy(theirs.state_dict())
    before = everything(optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            _damage(state_dict, what)
            if "." in what:
                patch.setattr(f"shardopt.state.{what}", _raise_out_of_memory)
        with pytest.raises((ValueError, torch.OutOfMemoryError)) as caught:
            load(optimizer, state_dict)
    assert_same(everything(optimizer), before)
    step_with(model, optimizer, 2)
    return str(caught.value)


#: Where the state is from, what is wrong with it on the last rank, and what that rank says.
DAMAGED = [
    *(("fsdp1", "ours", what) for what in ("value", "step", "tensor_state.copy_to")),
    *(("fsdp1", "torch", what) for what in ("lr", "missing", "flat_encoding._copy_fragments")),
    *(("fsdp1 flat", "ours", what) for what in ("value", "lr", "missing", "tensor_state.copy_to")),
    *(("fsdp1 flat", "torch", what) for what in ("step", "slice_spec.encode_moments")),
    *(("fsdp columns", "ours", what) for what in ("step", "lr", "missing", "tensor_state.copy_to")),
    *(("fsdp columns", "torch", what) for what in ("value", "slice_spec.encode_moments")),
    *(("fsdp1", "momentum", "lr"), ("fsdp columns", "momentum", "param groups")),
]
ALL = product(["fsdp1", "fsdp1 flat", "fsdp columns"], ["ours", "torch"], ["value", "step", "lr", "missing"])
MESSAGES = {
    "value": "NaN",
    "step": "got step as -5.0",
    "lr": "param group 0: lr: got nan",
    "missing": "got",
    "param groups": "param_groups as NoneType",
}


@pytest.mark.parametrize(("way", "source", "what"), [*DAMAGED, *slow(ALL, besides=DAMAGED)])
def test_all_ranks_refuse(ranks: Pool, way: str, source: str, what: str) -> None:
    *others, damaged = ranks.run(3, _refused, way, source, what, timeout=30)
    assert MESSAGES.get(what, "out of memory") in damaged
    for message in others:
        assert "got state that another rank refused" in message


def test_no_rank_imports_damaged_state(ranks: Pool) -> None:
    """Float moments sharded as the parameters are."""
    *others, damaged = ranks.run(3, _refused, "fsdp columns", "torch", "value", import_state)
    assert "got exp_avg that stands for NaN" in damaged
    for message in others:
        assert "got state that another rank refused" in message


@pytest.mark.ranks(3, timeout=30)
def test_float_moments_on_some_ranks_only() -> None:
    model, optimizer = trained("fsdp columns", 1)
    theirs = torch.optim.AdamW(model.parameters())
    step_with(model, theirs, 1)
    state_dict = copy.deepcopy(theirs.state_dict())
    if dist.get_rank() == 1:
        state_dict["state"].clear()
    before = everything(optimizer)
    with pytest.raises(ValueError, match="got float moments on some ranks only"):
        optimizer.load_state_dict(state_dict)
    assert_same(everything(optimizer), before)


def _checkpoint(folder: str, way: str, convert: bool) -> str:
    """Damage in one rank's part only; the other ranks would wait for it where moments are coded anew."""
    model, optimizer = trained(way, 1)
    if dist.get_rank() == dist.get_world_size() - 1:
        _, _, local = _first({"state": dict(enumerate(optimizer.state.values()))}, "exp_avg")
        local.view(-1)[-1] = math.nan
    shardopt.checkpoint.save(folder, model, optimizer)
    model, optimizer = trained(way, 2, codec="companded8" if convert else "log8")
    before = everything(optimizer)
    with pytest.raises(CheckpointError) as caught:
        shardopt.checkpoint.load(folder, model, optimizer, convert=convert)
    assert_same(everything(optimizer), before)
    step_with(model, optimizer, 2)
    return str(caught.value)


@pytest.mark.parametrize(
    ("way", "convert"), [("fsdp", False), ("fsdp columns", True), ("fsdp1", True), ("fsdp1 flat", False)]
)
def test_no_rank_loads_a_damaged_checkpoint(ranks: Pool, tmp_path: Path, way: str, convert: bool) -> None:
    for message in ranks.run(3, _checkpoint, str(tmp_path), way, convert):
        assert "stands for NaN" in message
