"""quantize_state on shards: what is refused and told, and state dicts and reports on flat tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

import shardopt
from ranks.collectives import counted_collectives
from ranks.models import WAYS, make_net
from ranks.pool import Pool
from ranks.runs import snapshot_of, step_with
from ranks.snapshot import assert_same
from shardopt import quantize_state


def _added() -> None:
    sharded = WAYS["fsdp"](make_net())
    whole = nn.Parameter(torch.zeros(64, 128))
    optimizer = quantize_state(torch.optim.Adafactor([whole]))
    with pytest.raises(RuntimeError, match="depends on others of the parameter"):
        optimizer.add_param_group({"params": [p for p in sharded.parameters() if p.dim() == 2]})
    assert [group["params"] for group in optimizer.param_groups] == [[whole]]


def test_an_added_group_of_shards(ranks: Pool) -> None:
    ranks.run(1, _added)


class Mine(torch.optim.AdamW):
    """An optimizer that nobody has tested."""


def _untested() -> None:
    sharded = WAYS["fsdp"](make_net())
    with pytest.warns(UserWarning, match=r"copies of weights in keep=, as they are not detected on shards$"):
        quantize_state(Mine(list(sharded.parameters())))


def test_copies_of_weights_on_shards(ranks: Pool) -> None:
    ranks.run(1, _untested)


def _trained(way: str, seed: int = 0, steps: int = 2) -> tuple[nn.Module, Any]:
    model = WAYS[way](make_net(seed=seed))
    optimizer = quantize_state(torch.optim.NAdam(model.parameters()), min_quantized_numel=64)
    for step in range(steps):
        step_with(model, optimizer, step)
    return model, optimizer


def _own_state_dicts(way: str) -> None:
    model, optimizer = _trained(way)
    again = _trained(way, steps=0)[1]
    again.load_state_dict(optimizer.state_dict())
    for param, other in zip(
        *([p for g in o.param_groups for p in g["params"]] for o in (optimizer, again)), strict=True
    ):
        assert repr(again.state.get(other)) == repr(optimizer.state.get(param))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, optimizer.state_dict())
    before = snapshot_of(model, optimizer)
    with pytest.raises((ValueError, RuntimeError), match=r"other elements than this rank's|another rank"):
        optimizer.load_state_dict(everyone[dist.get_rank() - 1])
    assert_same(snapshot_of(model, optimizer), before)


@pytest.mark.parametrize("way", ["fsdp1", "fsdp1 flat"])
def test_state_dicts_of_flat_shards(ranks: Pool, way: str) -> None:
    ranks.run(2, _own_state_dicts, way)


def _other_flat_state() -> None:
    _, optimizer = _trained("fsdp1 flat")
    saved = optimizer.state_dict()
    index, state = next(iter(saved["state"].items()))
    names = ", ".join(state)
    saved["state"][index] = {"exp_avg": torch.zeros(3), **state}
    with pytest.raises(ValueError, match=f"got state of exp_avg, {names}"[:120]):
        optimizer.load_state_dict(saved)


def _copies_of_flat() -> None:
    _, optimizer = _trained("fsdp1 flat")
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="got a copy of an optimizer of flat parameters"):
            copied(optimizer)


def test_copies_would_not_know_their_shards(ranks: Pool) -> None:
    ranks.run(1, _copies_of_flat)


def test_state_of_other_flat_tensors(ranks: Pool) -> None:
    ranks.run(1, _other_flat_state)


def _refused_by_torch(way: str) -> None:
    """torch's own functions would drop the codes."""
    model, optimizer = _trained(way)
    with counted_collectives() as counted:
        for call in (
            lambda: get_optimizer_state_dict(model, optimizer),
            lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer),
            lambda: FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, optimizer.state_dict()),
        ):
            with pytest.raises(RuntimeError, match=r"(expected|or) shardopt\.checkpoint"):
                call()
    assert not counted


@pytest.mark.parametrize("way", ["fsdp1", "fsdp1 flat"])
def test_functions_of_torch_for_fsdp1(ranks: Pool, way: str) -> None:
    ranks.run(2, _refused_by_torch, way)


def _reports() -> None:
    _, optimizer = _trained("fsdp1 none flat")
    _, whole = _trained("single")
    flat, expected = shardopt.memory_report(optimizer).host, shardopt.memory_report(whole).host
    assert (flat.state, flat.scales) == (expected.state, expected.scales)


def test_memory_report(ranks: Pool) -> None:
    ranks.run(1, _reports)
