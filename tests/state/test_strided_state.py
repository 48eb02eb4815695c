"""Checkpoints and reports of models that are not contiguous: state is as for their contiguous copies, in any layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardopt
from shardopt.optim import ShardedOptimizer
from strided_problem import BF16, OPTIONS, Conv, advance, assert_equal, reversed_dims, trained

FORMATS: list[dict[str, Any]] = [
    {},
    {"codec": "fp32"},
    {"dtype": BF16, "master_weight_bits": 24},
]


@pytest.mark.parametrize(
    ("options", "how", "saved_strided"),
    [
        (FORMATS[0], "checkpoint", True),
        (FORMATS[1], "checkpoint", False),
        (FORMATS[2], "checkpoint", True),
        (FORMATS[2], "state dict", False),
        (FORMATS[0], "state dict", True),
    ],
    ids=str,
)
def test_round_trip(tmp_path: Path, how: str, options: dict[str, Any], saved_strided: bool) -> None:
    """Between models that lie in memory in different ways; steps go on with the same bits."""
    model, optimizer = trained(channels_last=saved_strided, **options)
    other, loaded = trained(channels_last=not saved_strided, steps=1, **options)
    if how == "checkpoint":
        shardopt.checkpoint.save(tmp_path / "saved", model, optimizer)
        shardopt.checkpoint.load(tmp_path / "saved", other, loaded)
    else:
        other.load_state_dict(model.state_dict())
        loaded.load_state_dict(optimizer.state_dict())
    assert_equal(loaded, optimizer)
    for each in ((model, optimizer), (other, loaded)):
        advance(*each, Conv(), 7)
    assert_equal(loaded, optimizer)


@pytest.mark.parametrize(
    ("codec", "load"),
    [
        ("log8", ShardedOptimizer.load_state_dict),
        ("log8", shardopt.checkpoint.import_state),
        ("fp32", ShardedOptimizer.load_state_dict),
    ],
)
def test_torch_state(codec: str, load: Callable[[ShardedOptimizer, Any], object]) -> None:
    """torch keeps moments laid out as the parameter is; and takes ours."""
    model, source = Conv(), Conv()
    theirs = torch.optim.AdamW(model.parameters())
    for number in range(2):
        advance(model, theirs, source, number)
    assert not theirs.state[model.first.weight]["exp_avg"].is_contiguous()
    contiguous = copy.deepcopy(theirs.state_dict())
    for state in contiguous["state"].values():
        state.update({key: value.contiguous() for key, value in state.items()})
    got, expected = (shardopt.AdamW(model.parameters(), codec=codec, **OPTIONS) for _ in range(2))
    load(got, theirs.state_dict())
    load(expected, contiguous)
    assert_equal(got, expected)
    theirs.load_state_dict(got.state_dict(dequantize=True))
    for optimizer in (got, theirs):
        advance(model, optimizer, source, 2)


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_full_precision(options: dict[str, Any]) -> None:
    (model, optimizer), (other, expected) = (trained(channels_last=c, **options) for c in (True, False))
    weights, expected_weights = optimizer.full_precision_parameters(), expected.full_precision_parameters()
    for param, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(weights[param], expected_weights[same])
        assert weights[param].is_contiguous()
    optimizer.load_full_precision_parameters({param: reversed_dims(x * 1.01) for param, x in weights.items()})
    expected.load_full_precision_parameters({param: x * 1.01 for param, x in expected_weights.items()})
    assert_equal(optimizer, expected)


def test_reports() -> None:
    """Numbers are those of the contiguous copies."""
    (_, got), (_, expected) = (trained(channels_last=c, dtype=BF16) for c in (True, False))
    assert shardopt.memory_report(got) == shardopt.memory_report(expected)
