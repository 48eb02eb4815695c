"""param_groups: options by patterns over the names of a model's parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardopt
from ranks.models import Net

NO_DECAY = ("*.bias", "norm.*")


def _names(groups: list[dict[str, Any]]) -> list[list[str]]:
    return [group["param_names"] for group in groups]


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]


def _tied() -> nn.Module:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    model.head.weight = model.embed.weight
    return model


def test_parameters_with_equal_options_are_one_group() -> None:
    net = Net()
    groups = shardopt.param_groups(net, {"embed.*": {"codec": "fp32"}, "head.weight": {"codec": "fp32"}}, NO_DECAY)
    assert _names(groups) == [
        ["embed.weight", "head.weight"],
        ["up.weight", "down.weight", "conv.weight", "gate.weight"],
        ["up.bias", "down.bias", "norm.weight", "norm.bias", "conv.bias", "gate.bias", "head.bias"],
    ]
    assert _options(groups) == [{"codec": "fp32"}, {}, {"weight_decay": 0.0}]
    params = dict(net.named_parameters())
    for group in groups:
        assert all(params[name] is p for name, p in zip(group["param_names"], group["params"], strict=True))


def test_the_last_override_wins_and_any_wins_over_no_decay() -> None:
    overrides = {
        "*": {"lr": 1.0, "eps": 1e-6},
        "up.*": {"lr": 2.0, "weight_decay": 0.5},
        "up.bias": {"lr": 3.0},
    }
    groups = shardopt.param_groups(Net(), overrides, ["*.bias"])
    options = {name: _options([group])[0] for group in groups for name in group["param_names"]}
    assert options["up.weight"] == {"lr": 2.0, "eps": 1e-6, "weight_decay": 0.5}
    assert options["up.bias"] == {"lr": 3.0, "eps": 1e-6, "weight_decay": 0.5}
    assert options["down.bias"] == {"lr": 1.0, "eps": 1e-6, "weight_decay": 0.0}


def test_options_are_equal_by_value() -> None:
    """In any order of keys; learning rates in tensors only if they are one. Without patterns there is one group."""
    overrides = {"up.*": {"lr": 1.0, "eps": 1e-6}, "down.*": {"eps": 1e-6, "lr": 1.0}}
    assert len(shardopt.param_groups(Net(), overrides)) == 2
    one, other = torch.tensor(0.5), torch.tensor(0.5)
    groups = shardopt.param_groups(Net(), {"up.*": {"lr": one}, "down.*": {"lr": one}, "head.*": {"lr": other}})
    assert len(groups) == 3
    assert groups[1]["lr"] is one
    (group,) = shardopt.param_groups(Net())
    assert set(group) == {"params", "param_names"}


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda net: torch.compile(net, backend="eager"),
        checkpoint_wrapper,
        lambda net: nn.DataParallel(torch.compile(checkpoint_wrapper(net), backend="eager")),
    ],
    ids=["DataParallel", "compile", "checkpoint", "all"],
)
def test_prefixes_of_wrappers_are_left_out(wrap: Any) -> None:
    expected = shardopt.param_groups(Net(), {"embed.weight": {"lr": 1.0}}, NO_DECAY)
    net = Net()
    net.up = checkpoint_wrapper(net.up)
    groups = shardopt.param_groups(wrap(net), {"embed.weight": {"lr": 1.0}}, NO_DECAY)
    assert _names(groups) == _names(expected)
    assert groups.table() == expected.table()


def test_a_module_called_module_keeps_its_name() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert _names(shardopt.param_groups(model, {"module.*": {"lr": 1.0}})) == [["module.weight", "module.bias"]]


@pytest.mark.parametrize("pattern", ["embed.*", "head.*"])
def test_a_shared_parameter_has_all_its_names(pattern: str) -> None:
    model = _tied()
    groups = shardopt.param_groups(model, {pattern: {"lr": 1.0}})
    assert _names(groups) == [["embed.weight"]]
    assert _options(groups) == [{"lr": 1.0}]
    assert [p.names for p in groups.parameters] == [("embed.weight", "head.weight")]
    model.decoder = model.encoder = nn.Linear(2, 2)
    groups = shardopt.param_groups(model, {"encoder.weight": {"lr": 1.0}})
    assert _names(groups) == [["embed.weight", "decoder.bias"], ["decoder.weight"]]


def test_table() -> None:
    model = _tied()
    model.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
    model.token = shardopt.StableEmbedding(1000, 8)
    groups = shardopt.param_groups(model, {"head.*": {"lr": 0.5, "codec": "fp32"}}, ["token.norm.*"])
    assert groups.table().splitlines() == [
        "parameter                      shape  group  options",
        "scale                         scalar      0  frozen",
        "embed.weight = head.weight     9 x 4      1  codec='fp32', lr=0.5",
        "token.weight                1000 x 8      0  float32 state (StableEmbedding)",
        "token.norm.weight                  8      2  weight_decay=0.0",
        "token.norm.bias                    8      2  weight_decay=0.0",
    ]


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("*embde*", "embed.weight"),
        ("norms.*", "norm.weight, norm.bias"),
        ("Up.*", "embed.weight, up.weight, up.bias"),  # case matters
    ],
)
def test_a_pattern_without_a_match_names_near_ones(pattern: str, near: str) -> None:
    given: list[dict[str, Any]] = [{"overrides": {pattern: {"lr": 1.0}}}, {"no_decay": [pattern]}]
    for options in given:
        with pytest.raises(ValueError, match="matches no parameter") as error:
            shardopt.param_groups(Net(), **options)
        assert f"got pattern {pattern!r}" in str(error.value)
        assert f"such as {near}" in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "no_decay", "message"),
    [
        ({"up.*": {"codecs": "fp32"}}, (), r"overrides\['up\.\*'\]: got unknown option 'codecs', expected 'codec'"),
        ({"up.*": {"qqqq": 1}}, (), r"got unknown option 'qqqq', expected one of .*betas.*weight_decay"),
        ({"up.*": {"params": []}}, (), r"got unknown option 'params'"),
        ({"up.*": "fp32"}, (), r"overrides\['up\.\*'\]: got 'fp32', expected a dict"),
        ({}, "*.bias", r"no_decay: got .*write \(\"\*\.bias\",\) for one"),
        ({}, None, r"no_decay: got "),
    ],
)
def test_refused(overrides: Any, no_decay: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shardopt.param_groups(Net(), overrides, no_decay)


@pytest.mark.parametrize("groups_of", [shardopt.param_groups, shardopt.muon_groups])
def test_what_is_no_initialized_model_is_refused(groups_of: Any) -> None:
    params = nn.Linear(3, 3).parameters()
    for given in (list(params), params):
        with pytest.raises(TypeError, match="expected a model, whose parameters have names; pass the module"):
            groups_of(given)
    with pytest.raises(ValueError, match=r"got 0.weight of a lazy module.*; take a forward pass first"):
        groups_of(nn.Sequential(nn.LazyLinear(3)))
