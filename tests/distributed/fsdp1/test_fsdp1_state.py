"""State dicts under FSDP1: each rank's own, loaded on the same ranks; and torch.optim's, quantized on load."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from helpers import RULES, through_a_file
from ranks.flat import forget_shards, gathered, pieces
from ranks.models import FEW_WORLDS, WAYS, Odds, copy_weights, fsdp1, make_net, make_odds
from ranks.pool import Pool
from ranks.runs import make_optimizer, snapshot_of, step_with, trained
from ranks.snapshot import assert_same, assert_same_on_rank_0
from shardopt.optim import ShardedOptimizer
from slow_cases import slow
from weight_formats import FORMATS

BF16 = torch.bfloat16
SMALL = {"min_quantized_numel": 32}
#: A rule of ours beside torch.optim's of the same hyper-parameters.
THEIRS: dict[str, Any] = {"adamw": torch.optim.AdamW, "momentum": torch.optim.SGD}


def _odds_pair(orig: bool, dtype: torch.dtype, rule: str, options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    _, model = make_odds(dtype, use_orig_params=orig)
    optimizer = RULES[rule].make(model.parameters(), **SMALL, **options)
    return model, optimizer


OPTIONS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("adamw", torch.float32, {}),
    ("adamw", torch.float32, {"codec": "fp32"}),
    ("adamw", BF16, {"codec": "bf16"}),
    ("lion", BF16, {"codec": "dynamic8", "block_size": 16, **FORMATS["bf16 24"].options}),
    ("momentum", BF16, {"codec": "companded8", **FORMATS["bf16 32"].options}),
    ("sgd", torch.float32, {}),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("rule", "dtype", "options", "world_size", "orig"),
    [
        *((*OPTIONS[0], *on) for on in FEW_WORLDS),
        *((*case, *FEW_WORLDS[place % 2]) for place, case in enumerate(OPTIONS) if place > 0),
        *slow((*case, *FEW_WORLDS[1 - place % 2]) for place, case in enumerate(OPTIONS) if place > 0),
    ],
)
def test_round_trip(world_size: int, orig: bool, rule: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model, optimizer = _odds_pair(orig, dtype, rule, options)
    for step in range(2):
        step_with(model, optimizer, step)
    loaded, loaded_optimizer = _odds_pair(orig, dtype, rule, options)
    copy_weights(model, loaded)
    loaded_optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    expected = gathered(model, optimizer)
    assert_same(gathered(loaded, loaded_optimizer), expected)
    for each in (model, optimizer), (loaded, loaded_optimizer):
        step_with(*each, 2)
    assert_same(gathered(loaded, loaded_optimizer), gathered(model, optimizer))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", ["fsdp1", "fsdp1 flat"])
def test_empty_state(way: str) -> None:
    model, optimizer = trained(way, 0)
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    for step in range(2):
        step_with(model, optimizer, step)
    assert_same(gathered(model, optimizer), snapshot_of(*trained("single", 2)))


def _from_torch(orig: bool, rule: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """The state of torch's optimizer over the sharded model, loaded into ours; and of one over the whole model."""
    whole, model = make_odds(dtype, use_orig_params=orig)
    theirs, their_whole = (THEIRS[rule](m.parameters(), **RULES[rule].hyper) for m in (model, whole))
    ours, our_whole = (RULES[rule].make(m.parameters(), **SMALL, **options) for m in (model, whole))
    for source, target, each in ((theirs, ours, model), (their_whole, our_whole, whole)):
        for step in range(2):
            step_with(each, source, step)
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert_same_on_rank_0(gathered(model, ours), lambda: snapshot_of(whole, our_whole))
    for each, optimizer in ((model, ours), (whole, our_whole)):
        step_with(each, optimizer, 2)
    assert_same_on_rank_0(gathered(model, ours), lambda: snapshot_of(whole, our_whole))


@pytest.mark.parametrize(
    ("rule", "options", "world_size", "orig"),
    [
        *(("adamw", {"codec": "log8", "block_size": size}, *on) for size in (16, 128) for on in FEW_WORLDS),
        *(("adamw", {"codec": "fp32"}, *on) for on in (*FEW_WORLDS, (3, False))),
        ("adamw", {"codec": "companded8"}, 3, True),
        ("adamw", {"codec": "dynamic8", "block_size": 16}, 4, False),
        ("adamw", {"codec": "bf16"}, 4, False),
        ("momentum", {"codec": "log8"}, 4, True),
        ("momentum", {"codec": "fp32"}, 3, False),
    ],
)
def test_state_of_torch(ranks: Pool, world_size: int, orig: bool, rule: str, options: dict[str, Any]) -> None:
    """Moments in blocks that are cut are put together from their owners' parts."""
    ranks.run(world_size, _from_torch, orig, rule, options, torch.float32)


@pytest.mark.parametrize(("world_size", "orig"), FEW_WORLDS)
def test_state_of_torch_and_master_weights(ranks: Pool, world_size: int, orig: bool) -> None:
    ranks.run(world_size, _from_torch, orig, "adamw", FORMATS["bf16 32"].options, BF16)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", ["fsdp1", "fsdp1 flat"])
def test_dequantized(way: str) -> None:
    """Float32 state goes into torch's optimizer, which goes on, and into ours of other codecs and block sizes."""
    model, optimizer = trained(way, 2)
    whole, whole_optimizer = trained("single", 2)
    states = [each.state_dict(dequantize=True) for each in (optimizer, whole_optimizer)]
    for other in ({"codec": "dynamic8", "block_size": 16}, {"codec": "fp32"}):
        loaded, loaded_whole = WAYS[way](make_net()), make_net()
        copy_weights(model, loaded)
        copy_weights(whole, loaded_whole)
        pair = make_optimizer(way, loaded, **other), make_optimizer("single", loaded_whole, **other)
        for each, target, state in zip((loaded, loaded_whole), pair, states, strict=True):
            target.load_state_dict(through_a_file(state))
            step_with(each, target, 2)
        assert_same(gathered(loaded, pair[0]), snapshot_of(loaded_whole, pair[1]))
    theirs = torch.optim.AdamW(model.parameters())
    theirs.load_state_dict(states[0])
    step_with(model, theirs, 2)


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


def _refused(orig: bool) -> list[str]:
    """State that another sharding or other options wrote is refused; nothing is changed."""
    model, optimizer = _fresh(orig)
    step_with(model, optimizer, 0)
    saved = optimizer.state_dict()
    others = [_fresh(orig, block_size=16), _fresh(orig, codec="dynamic8")]  # models that live say what their shards are
    found = [_error(other, saved) for _, other in others]
    whole = Odds()
    whole_optimizer = RULES["adamw"].make(whole.parameters(), **SMALL)
    step_with(whole, whole_optimizer, 0)
    found.append(_error(optimizer, whole_optimizer.state_dict()))
    return found


@pytest.mark.parametrize("orig", [True, False])
def test_what_does_not_fit_is_refused(ranks: Pool, orig: bool) -> None:
    for block_size, codec, whole in ranks.run(2, _refused, orig):
        assert "block_size=128" in block_size
        assert "codec='log8'" in codec
        assert "got" in whole
        assert "expected" in whole


def _of_another_rank(orig: bool, dequantize: bool) -> str:
    """Rank 0's file on every rank: the shapes of this model's shards happen to agree."""
    model = fsdp1(nn.Sequential(nn.Linear(64, 64, bias=False)), [], use_orig_params=orig)
    optimizer = RULES["adamw"].make(model.parameters(), **SMALL)
    step_with(model, optimizer, 0)
    shared = [optimizer.state_dict(dequantize=dequantize)]
    dist.broadcast_object_list(shared)
    return _error(optimizer, shared[0])


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("orig", [True, False])
def test_state_of_another_rank_is_refused(ranks: Pool, orig: bool, dequantize: bool) -> None:
    own, other = ranks.run(2, _of_another_rank, orig, dequantize)
    assert "got the state of other elements than another rank's" in own
    assert "got the state of other elements than this rank's" in other


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
