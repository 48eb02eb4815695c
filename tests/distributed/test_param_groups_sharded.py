"""param_groups of sharded models: the names are those of the bare model, and the groups those of the unsharded one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer

import shardopt
from ranks.deepspeed import (
    HYPER,
    WITHOUT_MASTERS,
    config,
    engine_snapshot,
    groups_of,
    make_engine,
    step_engine,
    step_whole,
    taking_gradients,
    whole_snapshot,
)
from ranks.models import WAYS, fsdp1, make_net
from ranks.pool import Pool
from ranks.runs import snapshot_of, step_with
from ranks.snapshot import assert_same

STEPS = 2
OVERRIDES: dict[str, dict[str, Any]] = {"embed.*": {"codec": "fp32"}, "*.weight": {"lr": 3e-2}, "down.*": {"lr": 2e-2}}
NO_DECAY = ("*.bias", "norm.*")
#: Options that are the same for all parameters of a unit of ``fsdp1``: "up", "conv", and what remains.
OF_UNITS: dict[str, dict[str, Any]] = {"up.*": {"lr": 3e-2, "codec": "companded8"}, "conv.*": {"weight_decay": 0.0}}
LAYOUTS = {"ddp": 2, "fsdp": 3, "hsdp": 4, "tp": 2, "fsdp1": 3, "fsdp1 none": 2, "zero": 3}


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]


def _trained(
    way: str,
    overrides: dict[str, dict[str, Any]],
    no_decay: tuple[str, ...] = (),
    *,
    before: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[nn.Module, Any]:
    net = make_net(dtype)
    options = {"min_quantized_numel": 64, "lr": 1e-2, **options}
    early = shardopt.param_groups(net, overrides, no_decay) if before else None
    model = WAYS[way](net)
    groups = early or shardopt.param_groups(model, overrides, no_decay)
    if way == "zero":
        optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=shardopt.AdamW8bit, **options)
    else:
        optimizer = shardopt.AdamW8bit(groups, **options)
    for step in range(STEPS):
        step_with(model, optimizer, step)
    return model, optimizer


def _as_whole(way: str, before: bool) -> None:
    bare, groups = make_net(), shardopt.param_groups(WAYS[way](make_net()), OVERRIDES, NO_DECAY)
    expected = shardopt.param_groups(bare, OVERRIDES, NO_DECAY)
    assert [group["param_names"] for group in groups] == [group["param_names"] for group in expected]
    assert _options(groups) == _options(expected)
    assert groups.table() == expected.table()
    run, whole = _trained(way, OVERRIDES, NO_DECAY, before=before), _trained("single", OVERRIDES, NO_DECAY)
    assert_same(snapshot_of(*run), snapshot_of(*whole))


@pytest.mark.parametrize("way", LAYOUTS)
def test_as_unsharded(ranks: Pool, way: str) -> None:
    ranks.run(LAYOUTS[way], _as_whole, way, False)


@pytest.mark.parametrize("way", ["ddp", "zero", "fsdp1"])
def test_groups_from_before_wrapping(ranks: Pool, way: str) -> None:
    """These keep the parameters."""
    ranks.run(LAYOUTS[way], _as_whole, way, True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["fsdp1 flat", "fsdp1 none flat"])
def test_names_of_the_parts_of_flat_parameters(way: str) -> None:
    groups = shardopt.param_groups(WAYS[way](make_net()), OF_UNITS)
    expected = shardopt.param_groups(make_net(), OF_UNITS)
    of = {name: _options([groups[p.group]])[0] for p in groups.parameters for name in p.names}
    assert of == {name: _options([expected[p.group]])[0] for p in expected.parameters for name in p.names}
    assert {p.names: p.shape for p in groups.parameters} == {p.names: p.shape for p in expected.parameters}
    assert sorted(name for group in groups for name in group["param_names"]) == [
        "_flat_param",
        "conv._flat_param",
        "up._flat_param",
    ]
    assert_same(snapshot_of(*_trained(way, OF_UNITS)), snapshot_of(*_trained("single", OF_UNITS)))


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


def _save(path: Path) -> None:
    shardopt.checkpoint.save(path, *_trained("fsdp", OF_UNITS))


def _load(way: str, path: Path) -> None:
    model = WAYS[way](make_net(seed=1))
    optimizer = shardopt.AdamW8bit(shardopt.param_groups(model, OF_UNITS), min_quantized_numel=64, lr=1e-2)
    shardopt.checkpoint.load(path, model, optimizer)
    assert_same(snapshot_of(model, optimizer), snapshot_of(*_trained("single", OF_UNITS)))


@pytest.mark.parametrize("way", ["fsdp1", "fsdp1 flat"])
def test_portable_checkpoints(ranks: Pool, tmp_path: Path, way: str) -> None:
    ranks.run(3, _save, tmp_path / "saved")
    ranks.run(2, _load, way, tmp_path / "saved")


@pytest.mark.ranks(2)
def test_torchs_state_dicts() -> None:
    model, optimizer = _trained("fsdp", OVERRIDES, NO_DECAY)
    found = get_optimizer_state_dict(model, optimizer)
    assert found["state"]["embed.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    other = WAYS["fsdp"](make_net(seed=1))
    loaded = shardopt.AdamW8bit(shardopt.param_groups(other, OVERRIDES, NO_DECAY), min_quantized_numel=64)
    set_optimizer_state_dict(other, loaded, found)
    assert loaded.param_groups[0]["param_names"] == ["embed.weight"]
    states = [
        {name.split("/")[1]: x for name, x in snapshot_of(*run).items() if name.startswith("embed.weight/")}
        for run in ((other, loaded), (model, optimizer))
    ]
    assert_same(*states)


@pytest.mark.ranks
@pytest.mark.parametrize(("way", "world_size"), [("zero", 1), ("zero", 2), ("fsdp", 2)])
def test_names_in_errors_are_those_of_the_parameters(way: str, world_size: int) -> None:
    """A rank of ZeroRedundancyOptimizer steps some of a group's parameters, in another order."""
    model, optimizer = _trained(way, {}, ())
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["fsdp", "fsdp1", "fsdp1 flat", "zero"])
def test_noise_of_stochastic_rounding(way: str) -> None:
    """Groups whose parameters are in another order than the model's have the noise of the model's order."""
    run = _trained(way, OF_UNITS, dtype=torch.bfloat16, **STOCHASTIC)
    assert_same(snapshot_of(*run), snapshot_of(*_trained("single", OF_UNITS, dtype=torch.bfloat16, **STOCHASTIC)))


def test_noise_follows_the_model() -> None:
    """Groups change nothing but their options; without the model, its order is that of the optimizer."""
    snapshots = []
    for make in (
        lambda net: shardopt.param_groups(net, {"up.*": {"lr": 1e-2}}),
        lambda net: net.parameters(),
        lambda net: [*net.parameters()][::-1],
    ):
        net = make_net(torch.bfloat16)
        optimizer = shardopt.AdamW8bit(make(net), min_quantized_numel=64, lr=1e-2, **STOCHASTIC)
        step_with(net, optimizer, 0)
        snapshots.append(snapshot_of(net, optimizer))
    assert_same(snapshots[0], snapshots[1])
    net = make_net(torch.bfloat16)
    attached = shardopt.AdamW8bit([*net.parameters()][::-1], min_quantized_numel=64, lr=1e-2, **STOCHASTIC)
    attached.attach(net)
    step_with(net, attached, 0)
    assert_same(snapshot_of(net, attached), snapshots[1])
    with pytest.raises(AssertionError):
        assert_same(snapshots[2], snapshots[1])


def test_a_look_at_groups_changes_no_noise() -> None:
    """On one rank of several it would let replicas drift apart."""
    snapshots = []
    for looks in (False, True):
        net = make_net(torch.bfloat16)
        optimizer = shardopt.AdamW8bit([*net.parameters()][::-1], min_quantized_numel=64, lr=1e-2, **STOCHASTIC)
        if looks:
            shardopt.param_groups(net).table()
        step_with(net, optimizer, 0)
        snapshots.append(snapshot_of(net, optimizer))
    assert_same(*snapshots)


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


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_noise_under_deepspeed(stage: int) -> None:
    model = taking_gradients(make_net())
    groups = shardopt.param_groups(model, OF_UNITS)
    engine = make_engine(model, config(stage, params=STOCHASTIC, bf16=WITHOUT_MASTERS), model_parameters=groups)
    whole = make_net(torch.bfloat16)
    optimizer = shardopt.AdamW8bit(shardopt.param_groups(whole, OF_UNITS), **HYPER, **STOCHASTIC)
    for step in range(STEPS):
        step_engine(engine, step)
        step_whole(whole, optimizer, step)
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))


@pytest.mark.ranks(2)
def test_a_group_added_to_a_zero_redundancy_optimizer() -> None:
    model = WAYS["zero"](make_net())
    first, second = shardopt.param_groups(model, no_decay=NO_DECAY)
    optimizer = ZeroRedundancyOptimizer([first], optimizer_class=shardopt.AdamW8bit)
    optimizer.add_param_group(second)
    step_with(model, optimizer, 0)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("stage", "zero", "options"),
    [
        (0, {}, {"bf16": {"enabled": True}}),
        (1, {}, {}),
        (2, {"round_robin_gradients": True}, {"bf16": {"enabled": True}}),
        (3, {"sub_group_size": 20000}, {}),
    ],
)
def test_deepspeed(stage: int, zero: dict[str, Any], options: dict[str, Any]) -> None:
    """ZeRO flattens each group by itself."""
    model = taking_gradients(make_net())
    groups = shardopt.param_groups(model, {pattern: {"lr": 3e-2} for pattern in NO_DECAY}, NO_DECAY)
    engine = make_engine(model, config(stage, zero=zero, **options), model_parameters=groups)
    whole = make_net(torch.bfloat16 if options else torch.float32).float()
    optimizer = shardopt.AdamW8bit(groups_of(whole), **HYPER)
    for step in range(STEPS):
        step_engine(engine, step)
        step_whole(whole, optimizer, step)
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))
