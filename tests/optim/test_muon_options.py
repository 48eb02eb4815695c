"""Muon's options, and the param groups that muon_groups makes: what is refused, and what goes with an algorithm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
import shardopt.optim.muon


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"momentum: got 1.0, expected a number in \[0.0, 1.0\)"),
        ({"eps": 0.0}, "eps: got 0 for Muon"),
        ({"momentum": 1.5}, r"momentum: got 1.5, expected a number in \[0.0, 1.0\)"),
        ({"ns_coefficients": (1, 2, math.nan)}, "ns_coefficients: got .*, expected finite numbers"),
        ({"ns_coefficients": [(1, 2, 3), (1, math.inf, 3)]}, "ns_coefficients: got .*, expected finite numbers"),
    ],
)
def test_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shardopt.Muon8bit([_parameter(8, 8)], **options)


def test_refused_group_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever error its parameters' shards raise."""
    optimizer = shardopt.Muon8bit([_parameter(8, 8)])

    def refused(param: torch.Tensor) -> None:
        raise RuntimeError("got placements that no parameter can have")

    monkeypatch.setattr(shardopt.optim.muon, "shard_of", refused)
    with pytest.raises(RuntimeError, match="placements"):
        optimizer.add_param_group({"params": [_parameter(4, 4)]})
    assert len(optimizer.param_groups) == 1


def test_learning_rate_goes_with_the_algorithm() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(4, 4), "up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
    overrides = {
        "embed.weight": {"algorithm": "muon"},
        "up.weight": {"algorithm": "adamw"},
        "down.weight": {"algorithm": "adamw", "lr": 0.5},
    }
    groups = shardopt.muon_groups(model, lr=0.25, adamw_lr=0.125, overrides=overrides)
    found = {p.names[0]: (p.options["algorithm"], p.options["lr"]) for p in groups.parameters}
    assert found["embed.weight"] == ("muon", 0.25)
    assert found["up.weight"] == ("adamw", 0.125)
    assert found["down.weight"] == ("adamw", 0.5)
    assert found["up.bias"] == ("adamw", 0.125)


def test_other_rule_of_groups() -> None:
    with pytest.raises(ValueError, match="other: got 'sgd', expected 'adamw' or 'lion'"):
        shardopt.muon_groups(nn.Linear(8, 8), other="sgd")


def test_autocast_changes_nothing() -> None:
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(32, 48))
        param.grad = torch.randn(32, 48)
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            shardopt.Muon8bit([param]).step()
        found.append(param.detach())
    assert torch.equal(*found)
