"""State that is damaged on one rank is refused by all that exchange moments when it is loaded; nothing is changed."""

from __future__ import annotations

import copy
import math
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
from shardopt.state.tensor_state import flat_slices
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
        return
    state, key, local = _first(state_dict, "exp_avg_scales", "exp_avg")
    if what == "value":
        local.view(-1)[0] = math.nan
    elif what == "step":
        state["step"] = torch.tensor(-5.0)
    else:
        del state[key]


def _refused(way: str, of_torch: bool, what: str) -> str:
    model, optimizer = trained(way, 1)
    specs = [optimizer._internals.state_of(p, g) for g in optimizer.param_groups for p in g["params"]]
    assert any(flat_slices(spec) or spec.exchanges_columns for spec in specs)
    source = optimizer
    if of_torch:
        source = torch.optim.AdamW(model.parameters())
        step_with(model, source, 1)
    state_dict = copy.deepcopy(source.state_dict())
    if dist.get_rank() == dist.get_world_size() - 1:
        _damage(state_dict, what)
    before = everything(optimizer)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        optimizer.load_state_dict(state_dict)
    assert_same(everything(optimizer), before)
    step_with(model, optimizer, 2)
    return str(caught.value)


DAMAGED = [
    *(("fsdp1", False, what) for what in ("value", "step")),
    *(("fsdp1", True, what) for what in ("lr", "missing")),
    *(("fsdp1 flat", False, what) for what in ("value", "lr", "missing")),
    *(("fsdp1 flat", True, what) for what in ("step",)),
    *(("fsdp columns", False, what) for what in ("step", "lr", "missing")),
    *(("fsdp columns", True, what) for what in ("value",)),
]
ALL_DAMAGED = product(["fsdp1", "fsdp1 flat", "fsdp columns"], [False, True], ["value", "step", "lr", "missing"])


@pytest.mark.parametrize(("way", "of_torch", "what"), [*DAMAGED, *slow(ALL_DAMAGED, besides=DAMAGED)])
def test_all_ranks_refuse(ranks: Pool, way: str, of_torch: bool, what: str) -> None:
    *others, damaged = ranks.run(3, _refused, way, of_torch, what)
    expected = {"value": "NaN", "step": "got step as -5.0", "lr": "param group 0: lr: got nan", "missing": "got"}
    assert expected[what] in damaged
    for message in others:
        assert "got state that another rank refused" in message


def _short_of_memory(way: str, of_torch: bool, function: str) -> str:
    """On one rank only, while state is coded or copied."""
    model, optimizer = trained(way, 1)
    source = optimizer
    if of_torch:
        source = torch.optim.AdamW(model.parameters())
        step_with(model, source, 1)
    state_dict = copy.deepcopy(source.state_dict())
    before = everything(optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(f"shardopt.state.{function}", _raise_out_of_memory)
        with pytest.raises((ValueError, torch.OutOfMemoryError)) as caught:
            optimizer.load_state_dict(state_dict)
    assert_same(everything(optimizer), before)
    step_with(model, optimizer, 2)
    return str(caught.value)


def _raise_out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize(
    ("way", "of_torch", "function"),
    [
        ("fsdp1", False, "tensor_state.copy_to"),
        ("fsdp1 flat", False, "tensor_state.copy_to"),
        ("fsdp columns", False, "tensor_state.copy_to"),
        ("fsdp1", True, "flat_encoding._copy_fragments"),
        ("fsdp1 flat", True, "slice_spec.encode_moments"),
        ("fsdp columns", True, "slice_spec.encode_moments"),
    ],
)
def test_all_ranks_stop_where_one_has_no_memory(ranks: Pool, way: str, of_torch: bool, function: str) -> None:
    *others, short = ranks.run(2, _short_of_memory, way, of_torch, function, timeout=30)
    assert short == "out of memory"
    for message in others:
        assert "got state that another rank refused" in message


def _momentum(way: str, what: str) -> str:
    """The optimizer has no moments until it has loaded some."""
    _, source = trained(way, 1, "momentum")
    state_dict = copy.deepcopy(source.state_dict())
    model, optimizer = trained(way, 1, "sgd")
    if dist.get_rank() == dist.get_world_size() - 1:
        if what == "lr":
            state_dict["param_groups"][0]["lr"] = math.nan
        else:
            state_dict["param_groups"] = None
    before = everything(optimizer)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        optimizer.load_state_dict(state_dict)
    assert_same(everything(optimizer), before)
    step_with(model, optimizer, 2)
    return str(caught.value)


@pytest.mark.parametrize("what", ["lr", "param groups"])
@pytest.mark.parametrize("way", ["fsdp1", "fsdp columns"])
def test_all_ranks_refuse_where_moments_are_new(ranks: Pool, way: str, what: str) -> None:
    *others, damaged = ranks.run(3, _momentum, way, what, timeout=30)
    assert {"lr": "param group 0: lr: got nan", "param groups": "param_groups as NoneType"}[what] in damaged
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


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("way", ["fsdp", "fsdp columns", "fsdp1", "fsdp1 flat"])
def test_no_rank_loads_a_damaged_checkpoint(ranks: Pool, tmp_path: Path, way: str, convert: bool) -> None:
    for message in ranks.run(3, _checkpoint, str(tmp_path), way, convert):
        assert "stands for NaN" in message


def _import(way: str) -> str:
    """Float moments sharded as the parameters are, damaged on one rank."""
    model, optimizer = trained(way, 1)
    theirs = torch.optim.AdamW(model.parameters())
    step_with(model, theirs, 1)
    state_dict = copy.deepcopy(theirs.state_dict())
    if dist.get_rank() == dist.get_world_size() - 1:
        _damage(state_dict, "value")
    before = everything(optimizer)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        import_state(optimizer, state_dict)
    assert_same(everything(optimizer), before)
    return str(caught.value)


def test_no_rank_imports_damaged_state(ranks: Pool) -> None:
    *others, damaged = ranks.run(3, _import, "fsdp columns")
    assert "got exp_avg that stands for NaN" in damaged
    for message in others:
        assert "got state that another rank refused" in message
