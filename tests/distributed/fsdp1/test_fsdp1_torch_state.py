"""torch's own ways to an optimizer's state under FSDP1: ours is refused at once, on all ranks, and nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel
from torch.distributed.fsdp import StateDictType as Type

import shardopt
from ranks.collectives import counted_collectives
from ranks.flat import gathered
from ranks.models import copy_weights, fsdp1, make_net
from ranks.runs import step_with
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from versions import needs_fsdp1_on_some_ranks, shards_may_be_empty

SMALL = {"min_quantized_numel": 64}


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer as Accelerate does."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


def _made(orig: bool, steps: int, group: Any = None, **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    model = fsdp1(make_net(), use_orig_params=orig, process_group=group)
    optimizer = shardopt.AdamW8bit(model.parameters(), **SMALL, **options)
    for step in range(steps):
        step_with(model, optimizer, step)
    return model, optimizer


def _refused(optimizer: ShardedOptimizer, remedy: str, call: Callable[[], object]) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError) as caught:
        call()
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for index, entries in before["state"].items():
        assert_same(after["state"][index], entries)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize(("steps", "options"), [(0, {}), (1, {}), (1, {"codec": "fp32"}), (1, {"codec": "bf16"})])
def test_saving_is_refused(orig: bool, steps: int, options: dict[str, Any]) -> None:
    model, optimizer = _made(orig, steps, **options)
    save = FullyShardedDataParallel.optim_state_dict
    calls: list[Callable[[], object]] = [
        lambda: save(model, optimizer),
        lambda: save(model, optimizer, optimizer.state_dict()),
        lambda: save(model, optim=Wrapper(optimizer)),
        lambda: FullyShardedDataParallel.full_optim_state_dict(model, optimizer),
        lambda: FullyShardedDataParallel.sharded_optim_state_dict(model, optimizer),
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: get_optimizer_state_dict(model, [optimizer], options=StateDictOptions(full_state_dict=True)),
    ]
    for call in calls:
        with counted_collectives() as collectives:
            _refused(optimizer, "shardopt.checkpoint.save(path, model, optimizer)", call)
        assert collectives == []
    if shards_may_be_empty:
        _refused(
            optimizer, "shardopt.checkpoint.save(path, model, optimizer)", lambda: get_state_dict(model, optimizer)
        )
    assert bool(optimizer.state) is bool(steps)


def _legacy(model: nn.Module, optimizer: ShardedOptimizer, saved: dict[str, Any], remedy: str) -> None:
    fsdp = FullyShardedDataParallel
    _refused(optimizer, remedy, lambda: fsdp.shard_full_optim_state_dict(saved, model, optim=optimizer))
    _refused(optimizer, remedy, lambda: fsdp.shard_full_optim_state_dict(saved, model))
    _refused(optimizer, remedy, lambda: fsdp.flatten_sharded_optim_state_dict(saved, model, optimizer))
    on_first = saved if dist.get_rank() == 0 else None
    _refused(optimizer, remedy, lambda: fsdp.scatter_full_optim_state_dict(on_first, model, optim=optimizer))
    _refused(optimizer, remedy, lambda: fsdp.scatter_full_optim_state_dict(on_first, model))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(("orig", "steps"), [(True, 0), (False, 0), (True, 1), (False, 1)])
def test_loading_is_refused(orig: bool, steps: int, flatten: bool) -> None:
    """On all ranks, even if only one has the state.

    State that torch gathered of our optimizer elsewhere, where it can.
    """
    whole = make_net()
    their_optimizer = shardopt.AdamW8bit(whole.parameters(), **SMALL)
    step_with(whole, their_optimizer, 0)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved = get_optimizer_state_dict(whole, their_optimizer, options=options)
    model, optimizer = _made(orig, steps)
    remedy = "shardopt.checkpoint.load(path, model, optimizer)"
    load = FullyShardedDataParallel.optim_state_dict_to_load
    _refused(optimizer, remedy, lambda: load(model, optimizer, saved))
    _refused(optimizer, remedy, lambda: set_optimizer_state_dict(model, optimizer, saved, options=options))
    if flatten:
        return
    on_first = saved if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    _refused(optimizer, remedy, lambda: set_optimizer_state_dict(model, optimizer, on_first, options=options))
    only = FullOptimStateDictConfig(rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, Type.FULL_STATE_DICT, FullStateDictConfig(), only):
        _refused(optimizer, remedy, lambda: load(model, optimizer, on_first or None))
    _legacy(model, optimizer, saved, remedy)
    assert bool(optimizer.state) is bool(steps)


@pytest.mark.ranks(3, timeout=40)
@needs_fsdp1_on_some_ranks
@pytest.mark.parametrize("first", [0, 1])
def test_a_model_on_some_ranks(first: int) -> None:
    """The model is sharded over two of three ranks, which do not wait for the third."""
    own = [first, first + 1]
    group = dist.new_group(own)
    if dist.get_rank() not in own:
        return
    whole = make_net()
    theirs = shardopt.AdamW8bit(whole.parameters(), **SMALL)
    step_with(whole, theirs, 0)
    saved = get_optimizer_state_dict(whole, theirs)
    model, optimizer = _made(True, 1, group)
    on_first = saved if dist.get_rank(group) == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    remedy = "shardopt.checkpoint.load(path, model, optimizer)"
    _refused(optimizer, remedy, lambda: set_optimizer_state_dict(model, optimizer, on_first, options=options))
    scatter = FullyShardedDataParallel.scatter_full_optim_state_dict
    _refused(optimizer, remedy, lambda: scatter(on_first or None, model, optim=optimizer, group=group))


@pytest.mark.ranks(2)
def test_state_of_torch() -> None:
    """Moments of the parameters' shapes come in as ever; and go out, as float32."""
    model, ours = _made(False, 0)
    theirs = torch.optim.AdamW(model.parameters())
    step_with(model, theirs, 0)
    fsdp = FullyShardedDataParallel
    saved = fsdp.optim_state_dict(model, theirs)
    expected = _made(False, 0)
    copy_weights(model, expected[0])
    expected[1].load_state_dict(theirs.state_dict())
    for load in (
        lambda state: ours.load_state_dict(fsdp.optim_state_dict_to_load(model, ours, state)),
        lambda state: set_optimizer_state_dict(model, ours, state),
    ):
        load(copy.deepcopy(saved))
        assert_same(gathered(model, ours), gathered(*expected))
        ours.state.clear()
    ours.load_state_dict(theirs.state_dict())
    exported = fsdp.optim_state_dict(model, ours, ours.state_dict(dequantize=True))
    theirs.load_state_dict(fsdp.optim_state_dict_to_load(model, theirs, exported))
    for index, entries in ours.state_dict(dequantize=True)["state"].items():
        loaded = theirs.state_dict()["state"][index]
        assert_same({key: loaded[key] for key in entries}, entries)
