"""StableEmbedding beside ``test_layouts.py``: the state of its weight is float32 under DeepSpeed and in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardopt
from ranks.deepspeed import (
    BF16,
    ROUND_ROBIN,
    SUB_GROUPS,
    config,
    engine_snapshot,
    import_deepspeed,
    stepped_engine,
    stepped_whole,
    taking_gradients,
    whole_snapshot,
)
from ranks.models import TOKENS, Net, fsdp1, loss_of, make_batch, make_net
from ranks.snapshot import assert_same

STEPS = 2


def _net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    net = make_net(seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net.embed = shardopt.StableEmbedding(TOKENS, 66)
    return net.to(dtype)


def _is_float32(optimizer: Any, param: torch.Tensor) -> bool:
    return set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reshard", [False, True])
def test_fsdp2_of_a_model_on_the_meta_device(reshard: bool) -> None:
    """Forward and backward passes, in which FSDP2 puts gathered parameters in the module; the second case releases."""
    with torch.device("meta"):
        model = Net()
        model.embed = shardopt.StableEmbedding(TOKENS, 66)
    for layer in (model.embed, model.up, model):
        fully_shard(layer, reshard_after_forward=reshard)
    model.set_reshard_after_backward(reshard)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    embedding, other = model.embed.weight, model.up.weight
    if reshard:
        shardopt.release_gradients(model, optimizer)
    for step in range(2):
        loss_of(model, make_batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert _is_float32(optimizer, embedding)
    assert not _is_float32(optimizer, other)


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


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("stage", "zero", "options"), [(0, {}, BF16), (1, {}, {}), (2, ROUND_ROBIN, {}), (3, SUB_GROUPS, BF16)]
)
def test_deepspeed(stage: int, zero: dict[str, Any], options: dict[str, Any]) -> None:
    settings = config(stage, zero=zero, **options)
    engine = stepped_engine(settings, STEPS, taking_gradients(_net()))
    found = engine_snapshot(engine)
    assert {key for key in found if "embed.weight/" in key} == {
        f"embed.weight/{entry}" for entry in ("step", "exp_avg", "exp_avg_sq")
    }
    assert_same(found, whole_snapshot(*stepped_whole(settings, STEPS, _net())))


@pytest.mark.deepspeed_ranks(2)
def test_deepspeed_zero_init() -> None:
    settings = config(3)
    with import_deepspeed().zero.Init(config_dict_or_path=settings):
        net = _net()
    groups = shardopt.param_groups(net, no_decay=["*.bias"])
    assert {p.shape for p in groups.parameters if p.names == ("embed.weight",)} == {(TOKENS, 66)}
    engine = stepped_engine(settings, 1, taking_gradients(net), model_parameters=groups)
    assert "embed.weight/exp_avg" in engine_snapshot(engine)
