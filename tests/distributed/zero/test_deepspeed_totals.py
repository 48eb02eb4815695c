"""Sums over all parameters under DeepSpeed: one estimate of Prodigy for all ranks, or an error; and in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardopt
from ranks.deepspeed import (
    HYPER,
    config,
    engine_snapshot,
    groups_of,
    make_engine,
    step_engine,
    step_whole,
    stepped_engine,
    stepped_whole,
    taking_gradients,
    whole_snapshot,
)
from ranks.models import make_net
from ranks.pool import Pool
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer

STEPS = 3
ROUND_ROBIN = {"round_robin_gradients": True}
SUB_GROUPS = {"sub_group_size": 20000}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
#: With an L2 penalty, which all gradients have in common, so that the estimate grows.
PRODIGY = {"lr": 1.0, "d0": 1e-3, "d_coef": 20.0, "weight_decay": 2.0, "decouple": False}


def _check(engine: Any, whole: nn.Module, optimizer: ShardedOptimizer) -> None:
    """Demands that an engine holds what the unsharded optimizer holds, and has its estimate."""
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))
    found = {group["d"] for group in engine.basic_optimizer.param_groups}
    assert found == {group["d"] for group in optimizer.param_groups}
    assert found.pop() > PRODIGY["d0"]


def _with_one_estimate(settings: dict[str, Any]) -> None:
    engine = stepped_engine(settings, STEPS)
    _check(engine, *stepped_whole(STEPS, "prodigy", **PRODIGY))


@pytest.mark.parametrize(
    ("stage", "zero"), [(0, {}), (1, ROUND_ROBIN), (2, {}), (2, OFFLOAD), (3, {}), (3, {**OFFLOAD})]
)
def test_sums_over_all_parameters(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any]) -> None:
    deepspeed_ranks.run(3, _with_one_estimate, config(stage, "Prodigy8bit", zero=zero, params=PRODIGY))


def _groups_in_one_step(settings: dict[str, Any]) -> None:
    model, whole = taking_gradients(make_net()), make_net()
    groups, own = ([{**group, "lr": 1.0} for group in groups_of(m)] for m in (model, whole))
    engine = make_engine(model, settings, model_parameters=groups)
    optimizer = shardopt.Prodigy8bit(own, **{**HYPER, **PRODIGY})
    for step in range(STEPS):
        step_engine(engine, step)
        step_whole(whole, optimizer, step)
    _check(engine, whole, optimizer)


def test_sums_over_all_param_groups(deepspeed_ranks: Pool) -> None:
    deepspeed_ranks.run(2, _groups_in_one_step, config(0, "Prodigy8bit", params=PRODIGY))


def _stepped_one_by_one(stage: int, zero: dict[str, Any], grouped: bool) -> None:
    with pytest.raises(RuntimeError, match=r"got Prodigy8bit with .*, which ZeRO steps one after another, expected a"):
        stepped_engine(config(stage, "Prodigy8bit", zero=zero), 0, grouped=grouped)


@pytest.mark.parametrize(
    ("stage", "zero", "grouped"), [(1, {}, True), (2, {}, True), (3, {}, True), (3, SUB_GROUPS, False)]
)
def test_sums_over_parts_of_the_parameters_are_refused(
    deepspeed_ranks: Pool, stage: int, zero: dict[str, Any], grouped: bool
) -> None:
    deepspeed_ranks.run(2, _stepped_one_by_one, stage, zero, grouped)


def _resumed_with_estimate(settings: dict[str, Any], path: Path, portable: bool) -> None:
    engine = stepped_engine(settings, STEPS)
    if portable:
        shardopt.checkpoint.save(path, engine)
    else:
        engine.save_checkpoint(str(path))
    engine = stepped_engine(settings, 2, seed=1)
    if portable:
        shardopt.checkpoint.load(path, engine)
    else:
        engine.load_checkpoint(str(path))
    _check(engine, *stepped_whole(STEPS, "prodigy", **PRODIGY))
    for step in range(STEPS, STEPS + 2):
        step_engine(engine, step)
    _check(engine, *stepped_whole(STEPS + 2, "prodigy", **PRODIGY))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_have_the_estimate(deepspeed_ranks: Pool, tmp_path: Path, stage: int, portable: bool) -> None:
    settings = config(stage, "Prodigy8bit", params=PRODIGY)
    deepspeed_ranks.run(2, _resumed_with_estimate, settings, tmp_path / "saved", portable)
