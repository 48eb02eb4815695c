"""StableEmbedding beside ``test_layouts.py``: the state of its weight is float32 under DeepSpeed and in training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardopt
from ranks.deepspeed import (
    HYPER,
    config,
    engine_snapshot,
    import_deepspeed,
    make_engine,
    step_engine,
    step_whole,
    taking_gradients,
    whole_snapshot,
)
from ranks.models import TOKENS, Net, fsdp1, loss_of, make_batch, make_net
from ranks.pool import Pool
from ranks.snapshot import Snapshot, assert_same

STEPS = 2


def _net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    net = make_net(seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net.embed = shardopt.StableEmbedding(TOKENS, 66)
    return net.to(dtype)


def _check_formats(found: Snapshot) -> None:
    """Demands float32 moments of the embedding, and codes of its neighbour."""
    for moment in ("exp_avg", "exp_avg_sq"):
        assert found[f"embed.weight/{moment}"].dtype == torch.float32
        assert found[f"up.weight/{moment}_codes"].dtype == torch.uint8
    assert not [key for key in found if key.startswith("embed.weight/") and "_codes" in key]


def _is_float32(optimizer: Any, param: torch.Tensor) -> bool:
    return set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("reshard", "release"), [(False, False), (True, True)])
def test_fsdp2_training(reshard: bool, release: bool) -> None:
    """Forward and backward passes, in which FSDP2 puts gathered parameters in the module."""
    model = _net()
    for layer in (model.embed, model.up, model):
        fully_shard(layer, reshard_after_forward=reshard)
    model.set_reshard_after_backward(reshard)
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    embedding = model.embed.weight
    if release:
        shardopt.release_gradients(model, optimizer)
    for step in range(2):
        loss_of(model, make_batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert embedding in optimizer.state
    assert _is_float32(optimizer, embedding)


@pytest.mark.ranks(2)
def test_fsdp2_of_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Net()
        model.embed = shardopt.StableEmbedding(TOKENS, 66)
    for layer in (model.embed, model):
        fully_shard(layer)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    loss_of(model, make_batch(0)).backward()
    optimizer.step()
    assert _is_float32(optimizer, model.embed.weight)
    assert not _is_float32(optimizer, model.up.weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_tied_under_fsdp1(flat: bool) -> None:
    """The head comes first in the model, so that FSDP1 takes its name for the flat parameter's part."""
    embedding = shardopt.StableEmbedding(TOKENS, 66)
    model = nn.ModuleDict({"a_head": nn.Linear(66, TOKENS), "embed": embedding})
    model["a_head"].weight = embedding.weight
    wrapped = fsdp1(model, [], use_orig_params=not flat)
    optimizer = shardopt.AdamW8bit(wrapped.parameters(), min_quantized_numel=64)
    for param in wrapped.parameters():
        param.grad = torch.ones_like(param) if param.numel() else None
    optimizer.step()
    assert all("_codes" not in key for state in optimizer.state.values() for key in state)
    groups = shardopt.param_groups(wrapped, {"embed.weight": {"codec": "fp32"}}) if not flat else None
    if groups is not None:
        assert groups[0]["param_names"] == ["a_head.weight"]
    names = {part.names for part in shardopt.param_groups(wrapped).parameters}
    assert ("a_head.weight", "embed.weight") in names


BF16 = {"bf16": {"enabled": True}}


def _deepspeed(stage: int, zero: dict[str, Any], options: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if options else torch.float32
    net = _net()
    model = taking_gradients(copy.deepcopy(net))
    engine = make_engine(model, config(stage, zero=zero, **options))
    whole = net.to(dtype).float()
    optimizer = shardopt.AdamW8bit(whole.parameters(), **HYPER)
    for step in range(STEPS):
        step_engine(engine, step)
        step_whole(whole, optimizer, step)
    found = engine_snapshot(engine)
    _check_formats(found)
    assert_same(found, whole_snapshot(whole, optimizer))


@pytest.mark.parametrize(
    ("stage", "zero", "options"),
    [(0, {}, BF16), (1, {}, {}), (2, {"round_robin_gradients": True}, {}), (3, {"sub_group_size": 20000}, BF16)],
)
def test_deepspeed(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any], options: dict[str, Any]) -> None:
    deepspeed_ranks.run(2 if options else 3, _deepspeed, stage, zero, options)  # a third is not exact in bf16


@pytest.mark.deepspeed_ranks(2)
def test_deepspeed_zero_init() -> None:
    deepspeed = import_deepspeed()
    settings = config(3)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        net = _net()
    groups = shardopt.param_groups(net, no_decay=["*.bias"])
    assert {p.shape for p in groups.parameters if p.names == ("embed.weight",)} == {(TOKENS, 66)}
    engine = make_engine(taking_gradients(net), settings, model_parameters=groups)
    step_engine(engine, 0)
    _check_formats(engine_snapshot(engine))
