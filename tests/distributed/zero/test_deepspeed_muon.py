"""Muon8bit under DeepSpeed's ZeRO 0 to 3: given the same gradients, what the unsharded optimizer holds."""

from __future__ import annotations

from typing import Any

import pytest

import shardopt
from pairs import slow
from ranks.deepspeed import (
    HYPER,
    config,
    engine_snapshot,
    make_engine,
    step_engine,
    step_whole,
    taking_gradients,
    whole_snapshot,
)
from ranks.models import make_net
from ranks.pool import Pool
from ranks.snapshot import assert_same

STEPS = 3
MEMORY = {"orthogonalize_memory": 100_000}
ROUND_ROBIN = {"round_robin_gradients": True}
SUB_GROUPS = {"sub_group_size": 20000}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
STAGES: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, ROUND_ROBIN),
    (2, {}),
    (3, SUB_GROUPS),
    (2, OFFLOAD),
    (3, OFFLOAD),
]


def _as_whole(stage: int, zero: dict[str, Any], by_config: bool) -> None:
    params: dict[str, Any] = dict(MEMORY)
    model = taking_gradients(make_net())
    if by_config:
        params |= {"adamw_lr": 3e-3, "no_decay": ["*.bias"]}
        engine = make_engine(model, config(stage, "Muon8bit", zero=zero, params=params))
    else:
        groups = shardopt.muon_groups(model, lr=HYPER["lr"], adamw_lr=3e-3, no_decay=("*.bias",))
        engine = make_engine(model, config(stage, "Muon8bit", zero=zero, params=params), model_parameters=groups)
    whole = make_net()
    groups = shardopt.muon_groups(whole, lr=HYPER["lr"], adamw_lr=3e-3, no_decay=("*.bias",))
    optimizer = shardopt.Muon8bit(groups, **{**HYPER, **MEMORY})
    for step in range(STEPS):
        step_engine(engine, step)
        step_whole(whole, optimizer, step)
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))


def _marked(stage: int) -> None:
    """DeepSpeed would orthogonalize the gradients of marked parameters for any optimizer with such a name."""
    found = []
    for marks in (True, False):
        model = taking_gradients(make_net())
        for name, param in model.named_parameters():
            if marks:
                param.use_muon = name.startswith(("up.weight", "down.weight"))
        excluded = {"exclude": ["conv.*", "gate.*"]} if not marks else {}
        engine = make_engine(model, config(stage, "Muon8bit", params={"adamw_lr": 3e-3, **excluded}))
        for step in range(STEPS):
            step_engine(engine, step)
        found.append(engine_snapshot(engine))
    assert_same(*found)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_marks_of_deepspeed(ranks: Pool, stage: int) -> None:
    ranks.run(2, _marked, stage)


@pytest.mark.parametrize(
    ("stage", "zero", "world_size", "by_config"),
    [
        *((stage, zero, 2 + index % 3, index % 2 == 0) for index, (stage, zero) in enumerate(STAGES)),
        *slow((stage, zero, world_size, True) for stage, zero in STAGES for world_size in (1, 2, 3, 4)),
    ],
)
def test_as_whole(ranks: Pool, stage: int, zero: dict[str, Any], world_size: int, by_config: bool) -> None:
    ranks.run(world_size, _as_whole, stage, zero, by_config)
