"""param_groups of sharded models beside ``test_layouts.py``: flat parameters, frameworks, errors and noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import shardopt
from ranks.deepspeed import (
    BF16,
    ROUND_ROBIN,
    SUB_GROUPS,
    WITHOUT_MASTERS,
    config,
    engine_snapshot,
    make_whole,
    step_whole,
    stepped_engine,
    taking_gradients,
    whole_snapshot,
)
from ranks.models import WAYS, fsdp1, make_net
from ranks.runs import make_optimizer, snapshot_of, step_with
from ranks.snapshot import assert_same

STEPS = 2
OVERRIDES: dict[str, dict[str, Any]] = {"embed.*": {"codec": "fp32"}, "*.weight": {"lr": 3e-2}, "down.*": {"lr": 2e-2}}
NO_DECAY = ("*.bias", "norm.*")
#: Options that are the same for all parameters of a unit of ``fsdp1``: "up", "conv", and what remains.
OF_UNITS: dict[str, dict[str, Any]] = {"up.*": {"lr": 3e-2, "codec": "companded8"}, "conv.*": {"weight_decay": 0.0}}


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["fsdp1 flat", "fsdp1 none flat"])
def test_names_of_the_parts_of_flat_parameters(way: str) -> None:
    groups = shardopt.param_groups(WAYS[way](make_net()), OF_UNITS)
    expected = shardopt.param_groups(make_net(), OF_UNITS)
    of = {name: _options([groups[p.group]])[0] for p in groups.parameters for name in p.names}
    assert of == {name: _options([expected[p.group]])[0] for p in expected.parameters for name in p.names}
    assert sorted(name for group in groups for name in group["param_names"]) == [
        "_flat_param",
        "conv._flat_param",
        "up._flat_param",
    ]


@pytest.mark.ranks(3)
def test_different_options_within_a_flat_parameter_are_refused() -> None:
    model = WAYS["fsdp1 flat"](make_net())
    with pytest.raises(ValueError, match="in one flat parameter") as error:
        shardopt.param_groups(model, {"down.weight": {"codec": "fp32"}})
    for words in ("embed.weight with no options", "down.weight with codec='fp32'", "use_orig_params=True"):
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
    names = {name for name, _ in make_net().named_parameters()}
    shapes = {name: tuple(param.shape) for name, param in make_net().named_parameters()}
    for word in str(error.value).split(": got")[0].split("), "):
        name, _, shape = word.rstrip(")").partition(" (")
        if name in names:
            assert str(shapes[name]) == f"({shape})"
        else:
            assert name.startswith("parameter ")


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


@pytest.mark.ranks(1)
@pytest.mark.parametrize("ignored", ["up", "down"])
def test_noise_beside_flat_parameters(ignored: str) -> None:
    """Parameters that FSDP1 ignores have numbers, too."""
    results = []
    for flat in (False, True):
        net = make_net(torch.bfloat16)
        left_out = [net.get_submodule(ignored)]
        model = fsdp1(net, (), use_orig_params=False, ignored_modules=left_out) if flat else net
        groups = shardopt.param_groups(model, no_decay=())
        optimizer = shardopt.AdamW8bit(groups, min_quantized_numel=64, lr=1e-2, **STOCHASTIC)
        for step in range(STEPS):
            step_with(model, optimizer, step)
        results.append(snapshot_of(model, optimizer))
    assert_same(*results)


@pytest.mark.ranks(2)
def test_a_group_added_to_a_zero_redundancy_optimizer() -> None:
    model = WAYS["zero"](make_net())
    first, second = shardopt.param_groups(model, no_decay=NO_DECAY)
    optimizer = ZeroRedundancyOptimizer([first], optimizer_class=shardopt.AdamW8bit)
    optimizer.add_param_group(second)
    step_with(model, optimizer, 0)


MASTERS: dict[str, Any] = {"bf16": WITHOUT_MASTERS, "params": STOCHASTIC}


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("stage", "zero", "options"),
    [(0, {}, BF16), (1, {}, {}), (2, ROUND_ROBIN, BF16), (3, SUB_GROUPS, {}), (2, {}, MASTERS), (3, {}, MASTERS)],
)
def test_deepspeed(stage: int, zero: dict[str, Any], options: dict[str, Any]) -> None:
    """ZeRO flattens each group by itself; noise follows the model."""
    settings = config(stage, zero=zero, **options)
    model = taking_gradients(make_net())
    engine = stepped_engine(settings, STEPS, model, model_parameters=shardopt.param_groups(model, OF_UNITS, NO_DECAY))
    whole, _ = make_whole(settings)
    params = settings["optimizer"]["params"]
    optimizer = shardopt.AdamW8bit(shardopt.param_groups(whole, OF_UNITS, NO_DECAY), **params)
    for step in range(STEPS):
        step_whole(whole, optimizer, step)
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))
