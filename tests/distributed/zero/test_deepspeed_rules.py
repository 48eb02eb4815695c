"""Rules and codecs under DeepSpeed's ZeRO: Muon's matrices, and Prodigy's sums over all parameters, too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardopt
from ranks.deepspeed import (
    HYPER,
    OFFLOAD,
    ROUND_ROBIN,
    STAGES,
    STEPS,
    SUB_GROUPS,
    Twins,
    assert_as_whole,
    config,
    engine_snapshot,
    groups_of,
    load_own,
    load_portable,
    runs_as_whole,
    save_own,
    save_portable,
    step_whole,
    stepped_engine,
    twins,
)
from ranks.models import make_net
from ranks.pool import Pool
from ranks.snapshot import assert_same
from slow_cases import slow

Zero = dict[str, Any]


@pytest.mark.parametrize(
    ("stage", "kind", "params"),
    [
        (2, "Adam8bit", {}),
        (3, "Lion8bit", {"lr": 1e-3, "codec": "companded8", "block_size": 32}),
        (2, "SGD8bit", {"momentum": 0.9, "codec": "dynamic8"}),
        (3, "AdamW4bit", {"codec": "log4"}),
        (2, "AdEMAMix8bit", {"alpha_steps": 3, "beta3_steps": 4}),
        (3, "AdamW8bit", {"amsgrad": True, "block_size": 32}),
        (2, "LAMB8bit", {"weight_decay": 0.1}),
        (3, "Lion8bit", {"lr": 1e-3, "cautious": True, "block_size": 32}),
        (2, "AdamW8bit", {"codec": "bf16"}),
        (3, "AdamW8bit", {"codec": "fp32"}),
        (2, "adamw8bit", {}),
        (1, "ADAMW8BIT", {}),
        *slow(
            [
                (3, "Adam8bit", {}),
                (2, "Lion8bit", {"lr": 1e-3, "codec": "companded8", "block_size": 32}),
                (3, "SGD8bit", {"momentum": 0.9, "codec": "dynamic8"}),
                (2, "AdamW4bit", {"codec": "log4"}),
                (3, "AdEMAMix8bit", {"alpha_steps": 3, "beta3_steps": 4}),
                (2, "AdamW8bit", {"amsgrad": True, "block_size": 32}),
                (3, "LAMB8bit", {"weight_decay": 0.1}),
                (2, "Lion8bit", {"lr": 1e-3, "cautious": True, "block_size": 32}),
                (3, "AdamW8bit", {"codec": "bf16"}),
                (2, "AdamW8bit", {"codec": "fp32"}),
            ]
        ),
    ],
)
def test_rules_and_codecs(deepspeed_ranks: Pool, stage: int, kind: str, params: dict[str, Any]) -> None:
    """By a type in any letter case."""
    zero = dict(STAGES)[stage]
    deepspeed_ranks.run(3, runs_as_whole, twins(config(stage, kind, zero=zero, params=params)))


MUON = {"adamw_lr": 3e-3, "no_decay": ("*.bias",)}


def _muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    return shardopt.muon_groups(model, lr=HYPER["lr"], adamw_lr=MUON["adamw_lr"], no_decay=MUON["no_decay"])


def _muon_engine(kind: str, stage: int, zero: Zero, by_config: bool, steps: int) -> Any:
    if by_config:
        return stepped_engine(config(stage, kind, zero=zero, params=MUON), steps)
    model = make_net()
    settings = config(stage, kind, zero=zero)
    return stepped_engine(settings, steps, model, model_parameters=_muon_groups(model))


def _muon_whole(kind: str, steps: int) -> tuple[nn.Module, Any]:
    model = make_net()
    make = getattr(shardopt, kind)
    optimizer = make(_muon_groups(model), **HYPER)
    for step in range(steps):
        step_whole(model, optimizer, step)
    return model, optimizer


MUON_STAGES: list[tuple[int, Zero]] = [
    (0, {}),
    (1, ROUND_ROBIN),
    (2, {}),
    (3, SUB_GROUPS),
    (2, OFFLOAD),
    (3, OFFLOAD),
]


@pytest.mark.parametrize(
    ("kind", "stage", "zero", "world_size", "by_config"),
    [
        ("Muon8bit", 0, {}, 2, True),
        ("Muon8bit", 1, ROUND_ROBIN, 3, False),
        ("Muon8bit", 2, {}, 4, True),
        ("Muon8bit", 3, SUB_GROUPS, 2, False),
        ("Muon8bit", 2, OFFLOAD, 3, True),
        ("Muon8bit", 3, OFFLOAD, 4, False),
        ("NorMuon8bit", 2, {}, 3, True),
        ("NorMuon8bit", 3, OFFLOAD, 3, True),
        *slow(("Muon8bit", *stage, world_size, True) for stage in MUON_STAGES for world_size in (1, 2, 3, 4)),
        *slow(("NorMuon8bit", *stage, world_size, False) for stage in MUON_STAGES for world_size in (1, 2, 4)),
    ],
)
def test_muon(deepspeed_ranks: Pool, kind: str, stage: int, zero: Zero, world_size: int, by_config: bool) -> None:
    engine = partial(_muon_engine, kind, stage, zero, by_config)
    deepspeed_ranks.run(world_size, runs_as_whole, Twins(engine, partial(_muon_whole, kind)))


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_by_marks_of_deepspeed(stage: int) -> None:
    """DeepSpeed would orthogonalize the gradients of marked parameters for any optimizer with such a name."""
    snapshots = []
    for marks in (True, False):
        model = make_net()
        for name, param in model.named_parameters():
            if marks:
                param.use_muon = name.startswith(("up.weight", "down.weight"))
        excluded = {"exclude": ["conv.*", "gate.*"]} if not marks else {}
        settings = config(stage, "Muon8bit", params={"adamw_lr": 3e-3, **excluded})
        snapshots.append(engine_snapshot(stepped_engine(settings, STEPS, model)))
    assert_same(*snapshots)


#: With an L2 penalty, which all gradients have in common, so that the estimate grows.
PRODIGY = {"lr": 1.0, "d0": 1e-3, "d_coef": 20.0, "weight_decay": 2.0, "decouple": False}


@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (1, ROUND_ROBIN), (2, {}), (2, OFFLOAD), (3, {}), (3, OFFLOAD)])
def test_sums_over_all_parameters(deepspeed_ranks: Pool, stage: int, zero: Zero) -> None:
    deepspeed_ranks.run(3, runs_as_whole, twins(config(stage, "Prodigy8bit", zero=zero, params=PRODIGY)))


@pytest.mark.deepspeed_ranks(2)
def test_sums_over_all_param_groups() -> None:
    settings = config(0, "Prodigy8bit", params=PRODIGY)
    model, whole = make_net(), make_net()
    groups, expected = ([{**group, "lr": 1.0} for group in groups_of(m)] for m in (model, whole))
    engine = stepped_engine(settings, STEPS, model, model_parameters=groups)
    optimizer = shardopt.Prodigy8bit(expected, **{**HYPER, **PRODIGY})
    for step in range(STEPS):
        step_whole(whole, optimizer, step)
    assert_as_whole(engine, whole, optimizer)
    assert optimizer.param_groups[0]["d"] > PRODIGY["d0"]


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("stage", "zero", "grouped"), [(1, {}, True), (2, {}, True), (3, {}, True), (3, SUB_GROUPS, False)]
)
def test_sums_over_parts_of_the_parameters_are_refused(stage: int, zero: Zero, grouped: bool) -> None:
    with pytest.raises(RuntimeError, match=r"got Prodigy8bit with .*, which ZeRO steps one after another, expected a"):
        stepped_engine(config(stage, "Prodigy8bit", zero=zero), 0, grouped=grouped)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_have_the_estimate(deepspeed_ranks: Pool, tmp_path: Path, stage: int, portable: bool) -> None:
    of = twins(config(stage, "Prodigy8bit", params=PRODIGY))
    save, load = (save_portable, load_portable) if portable else (save_own, load_own)
    deepspeed_ranks.run(2, save, tmp_path, of)
    deepspeed_ranks.run(2, load, tmp_path, of)
