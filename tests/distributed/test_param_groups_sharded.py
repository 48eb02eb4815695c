"""param_groups and StableEmbedding in sharded models beside ``test_layouts.py``: names, errors and noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardopt
from ranks.models import TOKENS, WAYS, Net, fsdp1, loss_of, make_batch, make_net
from ranks.runs import make_optimizer, snapshot_of, step_with
from ranks.snapshot import assert_same

STEPS = 2
OVERRIDES: dict[str, dict[str, Any]] = {"embed.*": {"codec": "fp32"}, "*.weight": {"lr": 3e-2}, "down.*": {"lr": 2e-2}}
NO_DECAY = ("*.bias", "norm.*")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", ["ddp", "zero", "fsdp1"])
def test_groups_from_before_wrapping(way: str) -> None:
    """These keep the parameters."""
    snapshots = []
    for each in (way, "single"):
        net = make_net()
        groups = shardopt.param_groups(net, OVERRIDES, NO_DECAY)
        model = WAYS[each](net)
        optimizer = make_optimizer(each, model, params=groups)
        for step in range(STEPS):
            step_with(model, optimizer, step)
        snapshots.append(snapshot_of(model, optimizer))
    assert_same(*snapshots)


@pytest.mark.ranks(3)
def test_different_options_within_a_flat_parameter_are_refused() -> None:
    model = WAYS["fsdp1 flat"](make_net())
    with pytest.raises(ValueError, match="in one flat parameter") as error:
        shardopt.param_groups(model, {"down.weight": {"codec": "fp32"}})
    for words in ("embed.weight with no options", "down.weight with {'codec': 'fp32'}", "use_orig_params=True"):
        assert words in str(error.value)
    with pytest.raises(ValueError, match=r"got pattern '\*embde\*'.*embed\.weight"):
        shardopt.param_groups(model, {"*embde*": {"codec": "fp32"}})


@pytest.mark.ranks(2)
def test_a_wrapped_part_of_a_model() -> None:
    """The unit is not the whole model: names begin with its place there."""
    outer = nn.Module()
    outer.net = fsdp1(make_net(), use_orig_params=False)
    groups = shardopt.param_groups(outer, {"net.up.*": {"lr": 1.0}})
    assert {name for p in groups.parameters for name in p.names} == {f"net.{name}" for name in outer.net.bare_shapes}


@pytest.mark.ranks
@pytest.mark.parametrize(("way", "world_size"), [("zero", 1), ("zero", 2), ("fsdp", 2)])
def test_names_in_errors_are_those_of_the_parameters(way: str, world_size: int) -> None:
    """A rank of ZeroRedundancyOptimizer steps some of a group's parameters, in another order."""
    model = WAYS[way](make_net())
    optimizer = make_optimizer(way, model, params=shardopt.param_groups(model))
    step_with(model, optimizer, 0)
    inner = getattr(optimizer, "optim", optimizer)
    for group in inner.param_groups:
        assert "param_names" not in group or len(group["param_names"]) == len(group["params"])
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.nan)
    for group in inner.param_groups:
        group["nonfinite"] = "raise"
    with pytest.raises(FloatingPointError) as error:
        inner.step()
    shapes = {name: str(tuple(param.shape)) for name, param in make_net().named_parameters()}
    for word in str(error.value).split(": got")[0].split("), "):
        name, _, shape = word.rstrip(")").partition(" (")
        assert name.startswith("parameter ") or shapes[name] == f"({shape})"


STOCHASTIC = {"stochastic_rounding": True, "stochastic_rounding_seed": 7}


def test_noise_follows_the_model() -> None:
    """Groups change nothing but their options; without the model, its order is that of the optimizer.

    A look at the groups changes nothing: on one rank of several it would let replicas drift apart.
    """
    snapshots = {}
    for name in ("groups", "model", "attached", "looked at", "reversed"):
        net = make_net(torch.bfloat16)
        params = [*net.parameters()] if name == "model" else [*net.parameters()][::-1]
        groups = shardopt.param_groups(net, {"up.*": {"lr": 1e-2}}) if name == "groups" else params
        optimizer = shardopt.AdamW8bit(groups, min_quantized_numel=64, lr=1e-2, **STOCHASTIC)
        if name == "attached":
            optimizer.attach(net)
        if name == "looked at":
            shardopt.param_groups(net).table()
        step_with(net, optimizer, 0)
        snapshots[name] = snapshot_of(net, optimizer)
    for same in ("groups", "attached"):
        assert_same(snapshots[same], snapshots["model"])
    assert_same(snapshots["looked at"], snapshots["reversed"])
    with pytest.raises(AssertionError):
        assert_same(snapshots["reversed"], snapshots["model"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reshard", [False, True])
def test_a_stable_embedding_in_fsdp2_of_a_model_on_the_meta_device(reshard: bool) -> None:
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
    assert set(optimizer.state[embedding]) == {"step", "exp_avg", "exp_avg_sq"}
    assert "exp_avg_codes" in optimizer.state[other]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_a_tied_stable_embedding_under_fsdp1(flat: bool) -> None:
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
