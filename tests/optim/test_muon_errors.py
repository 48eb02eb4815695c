"""Options and parameters that Muon refuses, without a trace."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import shardopt
import shardopt.optim.muon
from helpers import everything
from muon_problem import advance, assert_equal, make
from ranks.snapshot import assert_same


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "step"}, "offload: got 'step' for Muon, which multiplies matrices where the parameters are"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients: got \(1.0, 2.0\), expected three numbers"),
        ({"ns_coefficients": "polar"}, "ns_coefficients: got 'polar', expected three numbers"),
        ({"ns_coefficients": None}, "ns_coefficients: got None"),
        ({"ns_coefficients": ()}, "ns_coefficients: got"),
        ({"ns_coefficients": [(1, 2, 3), (1, 2)]}, "ns_coefficients: got"),
        ({"ns_coefficients": (1, 2, math.nan)}, "ns_coefficients: got .*, expected finite numbers"),
        ({"ns_coefficients": [(1, 2, 3), (1, math.inf, 3)]}, "ns_coefficients: got .*, expected finite numbers"),
        ({"ns_steps": 0}, "ns_steps: got 0, expected a whole number from 1 to 99"),
        ({"ns_steps": 100}, "ns_steps: got 100"),
        ({"ns_steps": 2.5}, "ns_steps: got 2.5"),
        ({"normalize": "columns"}, "normalize: got 'columns', expected None or 'rows'"),
        ({"beta2": 1.0}, r"beta2: got 1.0, expected a number in \[0.0, 1.0\)"),
        ({"eps": -1.0}, "eps: got -1.0"),
        ({"eps": 0.0}, "eps: got 0 for Muon"),
        ({"momentum": 1.0}, r"momentum: got 1.0, expected a number in \[0.0, 1.0\)"),
        ({"momentum": 1.5}, r"momentum: got 1.5, expected a number in \[0.0, 1.0\)"),
        ({"momentum": -0.1}, "momentum: got -0.1"),
        ({"lr": -1.0}, "lr: got -1.0"),
        ({"weight_decay": -1.0}, "weight_decay: got -1.0"),
        ({"nesterov": 2}, "nesterov: got 2"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn: got 'rms', expected None or one of 'original'"),
        ({"algorithm": "sgd"}, "algorithm: got 'sgd', expected 'muon', 'adamw' or 'lion'"),
        ({"split": 3}, "split: got 3, expected None, 'each', or the rows of each matrix"),
        ({"split": ()}, "split: got"),
        ({"split": (40, 0)}, "split: got"),
        ({"split": "all"}, "split: got 'all'"),
        ({"split": (10, 20)}, r"got split=\(10, 20\) for a parameter of shape \(40, 130\), expected a sum of 40"),
        ({"split": "each"}, r"got split='each' for a parameter of shape \(40, 130\), expected three dimensions"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(shapes=((40, 130),), **options)


def test_a_parameter_that_is_no_matrix() -> None:
    named = [("up.weight", Parameter(torch.zeros(4, 4))), ("norm.weight", Parameter(torch.zeros(4)))]
    with pytest.raises(ValueError, match=r"norm\.weight.*got a parameter of shape \(4,\) in a param group for Muon"):
        shardopt.Muon8bit(named)
    with pytest.raises(ValueError, match=r"got a parameter of shape \(4,\).*muon_groups"):
        shardopt.Muon8bit([param for _, param in named])


def test_a_group_that_is_refused_leaves_no_trace() -> None:
    optimizer, expected = (advance(make(), range(1)) for _ in range(2))
    added = [{"params": [Parameter(torch.zeros(4))]}, {"params": [Parameter(torch.zeros(4, 4))], "split": (3, 3)}]
    for group in added:
        with pytest.raises(ValueError, match="got"):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    assert_equal(advance(optimizer, range(1, 3)), advance(expected, range(1, 3)))
    optimizer.add_param_group({**added[1], "split": (1, 3)})
    optimizer.add_param_group({**added[0], "algorithm": "adamw"})
    advance(optimizer, range(3, 4))


def test_a_group_is_not_kept_if_finding_its_shards_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make(shapes=((8, 8),))

    def refused(param: torch.Tensor) -> None:
        raise RuntimeError("got placements that no parameter can have")

    monkeypatch.setattr(shardopt.optim.muon, "shard_of", refused)
    with pytest.raises(RuntimeError, match="placements"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(4, 4))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("option", "value", "good"),
    [
        ("split", (10, 20), (10, 30)),
        ("algorithm", "rmsprop", "muon"),
        ("ns_steps", 0, 3),
        ("ns_coefficients", (1, 2), (2, -1.5, 0.5)),
    ],
)
def test_bad_changes_between_steps_change_nothing(option: str, value: Any, good: Any) -> None:
    optimizer = advance(make(shapes=((40, 130), (40, 30))), range(1))
    before = everything(optimizer)
    optimizer.param_groups[0][option] = value
    with pytest.raises(ValueError, match=option):
        advance(optimizer, range(1, 2))
    assert_same(everything(optimizer), before)
    optimizer.param_groups[0][option] = good
    advance(optimizer, range(1, 2))
