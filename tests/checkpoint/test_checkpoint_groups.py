"""Param groups in a checkpoint: which options a parameter was saved with, and that many of them take no time."""

from __future__ import annotations

import time

import pytest

from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.groups import options_by_name, saved_options

GROUPS = [{"parameters": ["a", "b"], "options": {"lr": 1}}, {"parameters": ["b", "c"], "options": {"lr": 2}}]


def test_the_first_group_with_a_name_counts() -> None:
    found = options_by_name(GROUPS)
    assert saved_options(found, ["a", "b"], 0) == {"lr": 1}
    assert saved_options(found, ["c"], 0) == {"lr": 2}
    assert saved_options(found, [], 0) == {}
    with pytest.raises(CheckpointError, match="param group 3: got parameters that were saved with different lr, expec"):
        saved_options(found, ["a", "c"], 3)
    with pytest.raises(CheckpointError, match="got no state of d, expected"):
        saved_options(found, ["a", "d"], 0)


@pytest.mark.parametrize("of_a_group", [1, 50_000])
def test_many_names(of_a_group: int) -> None:
    """Of a model with many experts: a minute and more, if each name were looked for in lists."""
    names = [f"model.layers.{number // 700}.experts.{number % 700}.weight" for number in range(50_000)]
    parts = [names[at : at + of_a_group] for at in range(0, len(names), of_a_group)]
    started = time.process_time()
    found = options_by_name([{"parameters": part, "options": {"lr": 1}} for part in parts])
    for index, part in enumerate(parts):
        assert saved_options(found, part, index) == {"lr": 1}
    assert saved_options(found, names, 0) == {"lr": 1}
    assert time.process_time() - started < 5
