"""Errors under FSDP1 are raised on all ranks, for NaN in one rank's shard too; none waits for another."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import shardopt
from helpers import RULES
from ranks.flat import Piece, forget_shards, gathered, pieces
from ranks.models import FEW_WORLDS, fsdp1, make_odds, set_gradients
from ranks.pool import Pool
from ranks.runs import snapshot_of, step_with
from ranks.snapshot import assert_same_on_rank_0
from shardopt.optim import ShardedOptimizer

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


def _optimizers(
    orig: bool, nonfinite: str, **options: Any
) -> tuple[nn.Module, ShardedOptimizer, Any, ShardedOptimizer]:
    whole, model = make_odds(use_orig_params=orig)
    options = {"nonfinite": nonfinite, **SMALL, **options}
    optimizer, expected = (RULES["adamw"].make(m.parameters(), **options) for m in (model, whole))
    return model, optimizer, whole, expected


def _spoil(model: nn.Module, name: str, element: int, value: float) -> int:
    """Puts a value into a gradient, on the rank that holds the element.

    Returns:
        How many elements of that parameter this rank holds.
    """
    piece = _piece(model, name)
    if piece.start <= element < piece.start + piece.numel:
        assert piece.tensor.grad is not None
        piece.of(piece.tensor.grad)[element - piece.start] = value
    return piece.numel


def _piece(model: nn.Module, name: str) -> Piece:
    return next(piece for piece in pieces(model) if piece.name == name)


def _raises(orig: bool, name: str, element: int, value: float, fine_steps: int) -> bool:
    """All ranks raise, also in the first step and those holding nothing of the parameter; then all go on."""
    model, optimizer, whole, expected = _optimizers(orig, "raise")
    for step in range(fine_steps):
        step_with(model, optimizer, step)
        step_with(whole, expected, step)
    for _ in range(2):
        set_gradients(model, fine_steps)
        held = _spoil(model, name, element, value)
        with pytest.raises(FloatingPointError) as caught:
            optimizer.step()
        shape = model.bare_shapes[name] if orig else tuple(_piece(model, name).tensor.shape)
        assert str(shape) in str(caught.value)
        assert "got a gradient with NaN or Inf; nothing was changed" in str(caught.value)
    step_with(model, optimizer, fine_steps)
    step_with(whole, expected, fine_steps)
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(whole, expected))
    return held == 0


@pytest.mark.parametrize("fine_steps", [0, 2])
@pytest.mark.parametrize(
    ("world_size", "orig", "name", "element", "value"),
    [
        (3, True, "units.0.weight0", 7, math.nan),  # the first of several ranges
        (3, True, "units.0.weight1", 96, math.inf),  # on the last rank only
        (4, True, "units.1.weight0", 2, -math.inf),  # not every rank holds something of it
        (4, True, "units.3.weight0", 256, math.nan),
        (3, False, "units.0.weight1", 96, math.inf),
        (4, False, "units.1.weight0", 2, math.nan),
    ],
)
def test_raise(
    ranks: Pool, world_size: int, orig: bool, name: str, element: int, value: float, fine_steps: int
) -> None:
    without = ranks.run(world_size, _raises, orig, name, element, value, fine_steps)
    assert any(without) == (name != "units.0.weight0")


@pytest.mark.ranks(3)
def test_raise_in_one_group() -> None:
    """Only parameters in groups that ask for it are looked at; the others skip."""
    _, model = make_odds()
    tensors = {piece.name: piece.tensor for piece in pieces(model)}
    watched = [tensors.pop("units.4.weight0"), tensors.pop("units.0.weight1")]
    groups = [{"params": list(tensors.values())}, {"params": watched, "nonfinite": "raise"}]
    optimizer = shardopt.AdamW8bit(groups, **SMALL)
    set_gradients(model, 0)
    _spoil(model, "units.2.weight0", 2000, math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
        _spoil(model, "units.0.weight1", 50, math.nan)
        with pytest.raises(FloatingPointError, match=r"\(97,\)"):
            optimizer.step()


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "orig"), FEW_WORLDS)
@pytest.mark.parametrize(
    ("codec", "block_size"),
    [
        ("log8", 128),
        ("dynamic8", 16),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("log8", 16), ("companded8", 128)]),
    ],
)
def test_skip(world_size: int, orig: bool, codec: str, block_size: int) -> None:
    """Skipped elements are those of one rank; whatever shares a block with them is not harmed."""
    model, optimizer, whole, expected = _optimizers(orig, "skip", codec=codec, block_size=block_size)
    spoilt = 0
    for step in range(4):
        set_gradients(model, step)
        set_gradients(whole, step)
        if step in (0, 2):
            generator = torch.Generator().manual_seed(step)
            for name, shape in model.bare_shapes.items():
                numel = torch.Size(shape).numel()
                for element in torch.randperm(numel, generator=generator)[: max(numel // 20, 1)].tolist():
                    value = (math.nan, math.inf, -math.inf)[element % 3]
                    _spoil(model, name, element, value)
                    whole.get_parameter(name).grad.view(-1)[element] = value
                    spoilt += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
            expected.step()
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(whole, expected))
    count = torch.tensor(optimizer.nonfinite_count)
    dist.all_reduce(count)
    assert count == expected.nonfinite_count == spoilt


def _strided(orig: bool) -> str:
    """FSDP1 flattens such weights in the order of memory, which is not that of their elements."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last))
    wrapped = FullyShardedDataParallel(model, use_orig_params=orig, device_id=torch.device("cpu"))
    optimizer = shardopt.AdamW8bit(wrapped.parameters())
    with pytest.raises(RuntimeError) as attaching:
        optimizer.attach(wrapped)
    with pytest.raises(RuntimeError) as stepping:
        optimizer.step()
    assert str(attaching.value) == str(stepping.value)
    return str(stepping.value)


@pytest.mark.parametrize("orig", [True, False])
def test_strided_weights(ranks: Pool, orig: bool) -> None:
    for message in ranks.run(2, _strided, orig):
        assert "0.weight" in message
        assert "contiguous" in message


@pytest.mark.ranks(2)
def test_wrong_state() -> None:
    """State that was put there by hand is looked at, before anything is changed."""
    model, optimizer, *_ = _optimizers(True, "skip")
    step_with(model, optimizer, 0)
    for piece in pieces(model):
        state = optimizer.state.get(piece.tensor)
        if state and piece.numel and "exp_avg_scales" in state:
            state["exp_avg_scales"] = state["exp_avg_scales"][:-1]
    set_gradients(model, 1)
    with pytest.raises(RuntimeError, match="got state exp_avg_scales as"):
        optimizer.step()
