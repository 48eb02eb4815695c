"""quantize_state under DeepSpeed's ZeRO 0 to 3: masters, codes and scales are those of the unsharded run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from ranks.deepspeed import (
    config,
    engine_snapshot,
    groups_of,
    make_engine,
    model_parameters,
    step_engine,
    step_whole,
    taking_gradients,
    whole_snapshot,
)
from ranks.models import make_net
from ranks.pool import Pool
from ranks.snapshot import assert_same
from shardopt import quantize_state
from wrapped import ELEMENTWISE

STEPS = 3
BF16 = {"bf16": {"enabled": True}}
STAGES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (0, {}, {}),
    (0, {}, BF16),
    (1, {"round_robin_gradients": True}, {}),
    (1, {}, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    (2, {"round_robin_gradients": True}, BF16),
    (2, {"offload_optimizer": {"device": "cpu"}}, {}),
    (3, {"sub_group_size": 20000}, {}),
    (3, {"offload_optimizer": {"device": "cpu"}}, BF16),
]
SMALL: dict[str, Any] = {"min_quantized_numel": 64, "working_memory": 32 * 20000}


def _make(params: Any, name: str = "torch NAdam") -> Any:
    return quantize_state(ELEMENTWISE[name](list(params)), **SMALL)


def _engine(stage: int, zero: dict[str, Any], sections: dict[str, Any], seed: int = 0) -> Any:
    dtype = torch.bfloat16 if "bf16" in sections else torch.float32
    model = taking_gradients(make_net(dtype, seed))
    settings = config(stage, None, zero=zero, **sections)
    return make_engine(model, settings, optimizer=_make(groups_of(model)), model_parameters=None)


def _whole(sections: dict[str, Any], steps: int) -> tuple[nn.Module, Any]:
    model = make_net(torch.bfloat16 if "bf16" in sections else torch.float32).float()
    optimizer = _make(groups_of(model))
    for step in range(steps):
        step_whole(model, optimizer, step)
    return model, optimizer


def _as_whole(stage: int, zero: dict[str, Any], sections: dict[str, Any]) -> None:
    engine = _engine(stage, zero, sections)
    for step in range(STEPS):
        step_engine(engine, step)
    whole, optimizer = _whole(sections, STEPS)
    expected = whole_snapshot(whole, optimizer)
    assert any(key.endswith("_codes") for key in expected)
    assert_same(engine_snapshot(engine), expected)
    dtype = next(engine.module.parameters()).dtype
    assert_same(model_parameters(engine), {name: p.detach().to(dtype) for name, p in whole.named_parameters()})


@pytest.mark.parametrize(("stage", "zero", "sections"), STAGES)
def test_as_unsharded(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any], sections: dict[str, Any]) -> None:
    deepspeed_ranks.run(2, _as_whole, stage, zero, sections)


def _save(path: Path, stage: int, zero: dict[str, Any], sections: dict[str, Any]) -> None:
    engine = _engine(stage, zero, sections)
    for step in range(STEPS):
        step_engine(engine, step)
    shardopt.checkpoint.save(path, engine)


def _load(path: Path, stage: int, zero: dict[str, Any], sections: dict[str, Any]) -> None:
    engine = _engine(stage, zero, sections, seed=1)
    step_engine(engine, 99)
    shardopt.checkpoint.load(path, engine)
    whole, optimizer = _whole(sections, STEPS)
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))
    step_engine(engine, STEPS)
    step_whole(whole, optimizer, STEPS)
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))


@pytest.mark.parametrize("place", range(1, len(STAGES)))
def test_portable_checkpoint(deepspeed_ranks: Pool, tmp_path: Path, place: int) -> None:
    """Each stage loads what the one before it saved on another number of ranks, with masters of its own dtype."""
    before, after = STAGES[place - 1], STAGES[place]
    deepspeed_ranks.run(4, _save, tmp_path, *before[:2], after[2])
    deepspeed_ranks.run(2, _load, tmp_path, *after)


def _own_checkpoint(path: Path, stage: int, zero: dict[str, Any], sections: dict[str, Any]) -> None:
    engine = _engine(stage, zero, sections)
    for step in range(STEPS):
        step_engine(engine, step)
    engine.save_checkpoint(str(path))
    again = _engine(stage, zero, sections, seed=1)
    again.load_checkpoint(str(path))
    for each in (engine, again):
        step_engine(each, STEPS)
    assert_same(engine_snapshot(again), engine_snapshot(engine))


@pytest.mark.parametrize("place", [2, 3, 6])
def test_checkpoint_of_deepspeed(deepspeed_ranks: Pool, tmp_path: Path, place: int) -> None:
    deepspeed_ranks.run(2, _own_checkpoint, tmp_path, *STAGES[place])


def _refusals() -> None:
    for make, zero, error, message in (
        (torch.optim.Adafactor, {}, RuntimeError, "flattens parameters"),
        (torch.optim.Adagrad, {}, RuntimeError, "another optimizer instead of Adagrad"),
        (torch.optim.AdamW, {"elastic_checkpoint": True}, ValueError, "elastic_checkpoint"),
    ):
        model = make_net()
        optimizer = quantize_state(make(model.parameters()))
        with pytest.raises(error, match=message):
            make_engine(model, config(2, None, zero=zero), optimizer=optimizer, model_parameters=None)
    model = make_net()
    optimizer = quantize_state(torch.optim.AdamW(model.parameters()), offload="state")
    with pytest.raises(ValueError, match="offload: got 'state' under DeepSpeed"):
        make_engine(model, config(2, None), optimizer=optimizer, model_parameters=None)
    model = make_net()
    settings = config(2, None, checkpoint={"load_universal": True})
    with pytest.raises(ValueError, match="load_universal"):
        make_engine(model, settings, optimizer=_make(model.parameters()), model_parameters=None)


def test_refusals(deepspeed_ranks: Pool) -> None:
    deepspeed_ranks.run(1, _refusals)
