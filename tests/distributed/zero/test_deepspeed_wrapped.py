"""quantize_state under DeepSpeed's ZeRO 0 to 3: masters, codes and scales are those of the unsharded run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranks.deepspeed import (
    BF16,
    BF16_OPTIMIZER,
    OFFLOAD,
    ROUND_ROBIN,
    SUB_GROUPS,
    Twins,
    config,
    groups_of,
    load_own,
    load_portable,
    make_engine,
    runs_as_whole,
    save_own,
    save_portable,
    step_whole,
    stepped_engine,
    whole_snapshot,
)
from ranks.models import make_net
from ranks.pool import Pool
from shardopt import quantize_state
from wrapped import ELEMENTWISE

STAGES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (0, {}, {}),
    (0, {}, BF16),
    (1, ROUND_ROBIN, {}),
    (1, {}, BF16_OPTIMIZER),
    (2, ROUND_ROBIN, BF16),
    (2, OFFLOAD, {}),
    (3, SUB_GROUPS, {}),
    (3, OFFLOAD, BF16),
]
SMALL: dict[str, Any] = {"min_quantized_numel": 64, "working_memory": 32 * 20000}


def _make(params: Any) -> Any:
    return quantize_state(ELEMENTWISE["torch NAdam"](list(params)), **SMALL)


def _engine(settings: dict[str, Any], steps: int, seed: int = 0) -> Any:
    model = make_net(torch.bfloat16 if "bf16" in settings else torch.float32, seed)
    return stepped_engine(settings, steps, model, optimizer=_make(groups_of(model)), model_parameters=None)


def _whole(settings: dict[str, Any], steps: int) -> tuple[nn.Module, Any]:
    model = make_net(torch.bfloat16 if "bf16" in settings else torch.float32).float()
    optimizer = _make(groups_of(model))
    for step in range(steps):
        step_whole(model, optimizer, step)
    assert not steps or any(key.endswith("_codes") for key in whole_snapshot(model, optimizer))
    return model, optimizer


def _twins(stage: int, zero: dict[str, Any], sections: dict[str, Any]) -> Twins:
    settings = config(stage, None, zero=zero, **sections)
    return Twins(partial(_engine, settings), partial(_whole, settings))


@pytest.mark.parametrize(("stage", "zero", "sections"), STAGES)
def test_as_unsharded(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any], sections: dict[str, Any]) -> None:
    deepspeed_ranks.run(2, runs_as_whole, _twins(stage, zero, sections))


@pytest.mark.parametrize("place", range(1, len(STAGES)))
def test_portable_checkpoint(deepspeed_ranks: Pool, tmp_path: Path, place: int) -> None:
    """Each stage loads what the one before it saved on another number of ranks, with masters of its own dtype."""
    before, after = STAGES[place - 1], STAGES[place]
    deepspeed_ranks.run(4, save_portable, tmp_path, _twins(*before[:2], after[2]))
    deepspeed_ranks.run(2, load_portable, tmp_path, _twins(*after))


@pytest.mark.parametrize("place", [2, 3, 6])
def test_checkpoint_of_deepspeed(deepspeed_ranks: Pool, tmp_path: Path, place: int) -> None:
    for work in (save_own, load_own):
        deepspeed_ranks.run(2, work, tmp_path, _twins(*STAGES[place]))


@pytest.mark.deepspeed_ranks(1)
def test_refusals() -> None:
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
