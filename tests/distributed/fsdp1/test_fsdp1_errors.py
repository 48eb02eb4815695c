"""Errors under FSDP1 are raised on all ranks; none waits for another."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import shardopt
from ranks.flat import forget_shards, gathered, pieces
from ranks.models import fsdp1, make_odds, set_gradients
from ranks.runs import snapshot_of, step_with
from ranks.snapshot import assert_same_on_rank_0

SMALL = {"min_quantized_numel": 32}


def _tiny() -> nn.Module:
    """With four ranks, two of them hold nothing at all."""
    return fsdp1(nn.Sequential(nn.Linear(1, 1)), [])


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("tiny", "orig"), [(False, True), (False, False), (True, True)])
def test_wrapped_before_the_import(tiny: bool, orig: bool) -> None:
    """Ranks without any gradient say so, too."""
    model = _tiny() if tiny else make_odds(use_orig_params=orig)[1]
    forget_shards(model)
    optimizer = shardopt.AdamW8bit(model.parameters())
    before = [param.detach().clone() for param in model.parameters()]
    set_gradients(model, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        assert "FullyShardedDataParallel" in str(caught.value)
        assert "import shardopt before wrapping the model, or call optimizer.attach(model) once" in str(caught.value)
    assert not any(optimizer.state.values())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    optimizer.attach(model)
    optimizer.step()
    assert all(not param.numel() or any(optimizer.state[param]) for param in model.parameters())


def _gathered_parameter(model: nn.Module, name: str) -> torch.Tensor:
    with FullyShardedDataParallel.summon_full_params(model):
        return model.module.get_parameter(name).detach().clone()


@pytest.mark.ranks(4)
def test_ranks_with_nothing() -> None:
    """A rank that holds nothing takes part, has no state, and saves and loads that."""
    model, whole = _tiny(), nn.Sequential(nn.Linear(1, 1))
    for name, param in whole.named_parameters():
        param.data = _gathered_parameter(model, name)
    optimizer, expected = (shardopt.AdamW8bit(m.parameters(), nonfinite="raise") for m in (model, whole))
    for step in range(3):
        step_with(model, optimizer, step)
        step_with(whole, expected, step)
        optimizer.load_state_dict(optimizer.state_dict())
    held = sum(piece.numel for piece in pieces(model))
    assert bool(optimizer.state_dict()["state"]) is bool(held)
    assert held or dist.get_rank() > 0
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(whole, expected))


def _spoil(model: nn.Module, name: str, element: int) -> None:
    """Puts NaN into a gradient, on the rank that holds the element."""
    piece = next(piece for piece in pieces(model) if piece.name == name)
    if piece.start <= element < piece.start + piece.numel:
        assert piece.tensor.grad is not None
        piece.of(piece.tensor.grad)[element - piece.start] = math.nan


@pytest.mark.ranks(3)
def test_raise_in_one_group() -> None:
    """Only parameters in groups that ask for it are looked at; the others skip."""
    _, model = make_odds()
    tensors = {piece.name: piece.tensor for piece in pieces(model)}
    watched = [tensors.pop("units.4.weight0"), tensors.pop("units.0.weight1")]
    groups = [{"params": list(tensors.values())}, {"params": watched, "nonfinite": "raise"}]
    optimizer = shardopt.AdamW8bit(groups, **SMALL)
    set_gradients(model, 0)
    _spoil(model, "units.2.weight0", 2000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
        _spoil(model, "units.0.weight1", 50)
        with pytest.raises(FloatingPointError, match=r"\(97,\)"):
            optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("orig", [True, False])
def test_strided_weights(orig: bool) -> None:
    """FSDP1 flattens such weights in the order of memory, which is not that of their elements."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last))
    wrapped = FullyShardedDataParallel(model, use_orig_params=orig, device_id=torch.device("cpu"))
    optimizer = shardopt.AdamW8bit(wrapped.parameters())
    with pytest.raises(RuntimeError) as attaching:
        optimizer.attach(wrapped)
    with pytest.raises(RuntimeError) as stepping:
        optimizer.step()
    assert str(attaching.value) == str(stepping.value)
    assert "0.weight" in str(stepping.value)
    assert "contiguous" in str(stepping.value)


@pytest.mark.ranks(2)
def test_wrong_state() -> None:
    """State that was put there by hand is looked at, before anything is changed."""
    _, model = make_odds()
    optimizer = shardopt.AdamW8bit(model.parameters(), **SMALL)
    step_with(model, optimizer, 0)
    for piece in pieces(model):
        state = optimizer.state.get(piece.tensor)
        if state and piece.numel and "exp_avg_scales" in state:
            state["exp_avg_scales"] = state["exp_avg_scales"][:-1]
    set_gradients(model, 1)
    with pytest.raises(RuntimeError, match="got state exp_avg_scales as"):
        optimizer.step()
