"""State dicts under FSDP1 beside ``test_layouts.py``: state of some parameters, and state that is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from helpers import RULES
from ranks.flat import forget_shards, gathered, pieces
from ranks.models import Odds, copy_weights, fsdp1, make_odds
from ranks.runs import snapshot_of, step_with
from ranks.snapshot import assert_same, assert_same_on_rank_0
from shardopt.optim import ShardedOptimizer

SMALL = {"min_quantized_numel": 32}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("orig", [True, False])
def test_only_some_parameters_have_state(orig: bool) -> None:
    """State of one unit, on the ranks that hold a part of it; the exchange of cut blocks takes place on all."""
    whole, model = make_odds(use_orig_params=orig)
    states = []
    for each in (model, whole):
        theirs = torch.optim.AdamW(each.parameters())
        tensors = {p.name: p.tensor for p in pieces(model)} if each is model else dict(whole.named_parameters())
        for name, param in tensors.items():
            if name.startswith("units.3.") and param.numel():
                param.grad = torch.ones_like(param)
        theirs.step()
        theirs.zero_grad()
        states.append(theirs.state_dict())
    ours, our_whole = (RULES["adamw"].make(m.parameters(), **SMALL) for m in (model, whole))
    ours.load_state_dict(states[0])
    our_whole.load_state_dict(states[1])
    for each, optimizer in ((model, ours), (whole, our_whole)):
        step_with(each, optimizer, 0)
    assert_same_on_rank_0(gathered(model, ours), lambda: snapshot_of(whole, our_whole))


def _fresh(orig: bool = True, **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    model = make_odds(use_orig_params=orig)[1]
    optimizer = RULES["adamw"].make(model.parameters(), **SMALL, **options)
    return model, optimizer


def _error(optimizer: Optimizer, state_dict: dict[str, Any]) -> str:
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        optimizer.load_state_dict(state_dict)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    return str(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("orig", [True, False])
def test_state_of_other_options_or_shards_is_refused(orig: bool) -> None:
    model, optimizer = _fresh(orig)
    step_with(model, optimizer, 0)
    saved = optimizer.state_dict()
    others = [_fresh(orig, block_size=16), _fresh(orig, codec="dynamic8")]  # models that live say what their shards are
    block_size, codec = (_error(other, saved) for _, other in others)
    assert "block_size=128" in block_size
    assert "codec='log8'" in codec
    whole = Odds()
    whole_optimizer = RULES["adamw"].make(whole.parameters(), **SMALL)
    step_with(whole, whole_optimizer, 0)
    said = _error(optimizer, whole_optimizer.state_dict())
    assert "got" in said
    assert "expected" in said


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("orig", [True, False])
def test_state_of_another_rank_is_refused(orig: bool, dequantize: bool) -> None:
    """Rank 0's file on every rank: the shapes of this model's shards happen to agree."""
    model = fsdp1(nn.Sequential(nn.Linear(64, 64, bias=False)), [], use_orig_params=orig)
    optimizer = RULES["adamw"].make(model.parameters(), **SMALL)
    step_with(model, optimizer, 0)
    shared = [optimizer.state_dict(dequantize=dequantize)]
    dist.broadcast_object_list(shared)
    whose = "another rank's" if dist.get_rank() == 0 else "this rank's"
    assert f"got the state of other elements than {whose}" in _error(optimizer, shared[0])


@pytest.mark.ranks(3)
def test_attached_late() -> None:
    """Loading has to know the shards: it says so, changes nothing, and works once it does."""
    model, optimizer = _fresh()
    step_with(model, optimizer, 0)
    loaded = make_odds()[1]
    forget_shards(loaded)
    copy_weights(model, loaded)
    late = RULES["adamw"].make(loaded.parameters(), **SMALL)
    with pytest.raises(RuntimeError, match=r"call optimizer\.attach\(model\)"):
        late.load_state_dict(optimizer.state_dict())
    assert not late.state
    late.attach(loaded)
    late.load_state_dict(optimizer.state_dict())
    late.attach(loaded)
    for each in (model, optimizer), (loaded, late):
        step_with(*each, 1)
    assert_same(gathered(loaded, late), gathered(model, optimizer))


@pytest.mark.ranks(2)
def test_empty_state_unattached() -> None:
    """Frameworks save and load the state of an optimizer that has none yet."""
    model = make_odds()[1]
    forget_shards(model)
    optimizer = RULES["adamw"].make(model.parameters(), **SMALL)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state
    assert dist.get_world_size() == 2
