"""Checkpoints of torch.distributed.checkpoint load on other numbers of ranks and other shardings, bit for bit."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from helpers import CODEC_NAMES
from ranks.pool import Pool
from ranks.runs import single, snapshot_of, step_with, trained
from ranks.snapshot import assert_same
from slow_cases import slow

STEPS = 2


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer, flat: bool) -> dict[str, object]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def _save(way: str, rule: str, codec: str, flat: bool, path: Path) -> None:
    model, optimizer = trained(way, STEPS, rule, codec=codec)
    dcp.save(_tensors(model, optimizer, flat), checkpoint_id=path)


def _load(way: str, rule: str, codec: str, flat: bool, path: Path) -> None:
    """Loads into a fresh run, and compares it and its next step with an unsharded run that was never saved."""
    model, optimizer = trained(way, 0, rule, codec=codec)
    tensors = _tensors(model, optimizer, flat)
    dcp.load(tensors, checkpoint_id=path)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_model_state_dict(model, tensors["model"])
    set_optimizer_state_dict(model, optimizer, tensors["optimizer"], options=options)
    assert_same(snapshot_of(model, optimizer), single(STEPS, rule, codec=codec))
    step_with(model, optimizer, STEPS)
    assert_same(snapshot_of(model, optimizer), single(STEPS + 1, rule, codec=codec))


#: Where checkpoints come from, and where they are loaded.
FROM = [(2, "fsdp"), (2, "fsdp columns"), (4, "fsdp columns tp"), (1, "single")]
TO = [(1, "single"), (1, "fsdp"), (3, "fsdp columns"), (4, "fsdp"), (4, "hsdp columns"), (4, "fsdp tp"), (3, "tp")]


@pytest.mark.parametrize(("saved_on", "saved_way"), FROM)
def test_load_elsewhere(ranks: Pool, tmp_path: Path, saved_on: int, saved_way: str) -> None:
    """Every other target each; all of them in the sweep."""
    ranks.run(saved_on, _save, saved_way, "adamw", "log8", False, tmp_path)
    for world_size, way in TO[FROM.index((saved_on, saved_way)) % 2 :: 2]:
        ranks.run(world_size, _load, way, "adamw", "log8", False, tmp_path)


IN_TURN = list(zip(cycle(["lion", "adamw"]), CODEC_NAMES, strict=False))
OTHERS = [case for case in product(["lion", "adamw"], CODEC_NAMES) if case not in IN_TURN]


@pytest.mark.parametrize(("rule", "codec"), [*IN_TURN, *slow(OTHERS)])
def test_codecs_and_flattened_names(ranks: Pool, tmp_path: Path, rule: str, codec: str) -> None:
    ranks.run(2, _save, "fsdp columns", rule, codec, True, tmp_path)
    ranks.run(3, _load, "fsdp columns", rule, codec, True, tmp_path)


@pytest.mark.parametrize(
    ("rule", "codec", "world_size", "way"),
    [
        ("repaid_adamw", "companded8", 4, "fsdp columns tp"),
        ("repaid_adamw", "companded8", 1, "single"),
        ("prodigy", "log8", 3, "fsdp"),
    ],
)
def test_shared_codes_and_estimates_in_param_groups(
    ranks: Pool, tmp_path: Path, rule: str, codec: str, world_size: int, way: str
) -> None:
    ranks.run(2, _save, "fsdp columns", rule, codec, False, tmp_path)
    ranks.run(world_size, _load, way, rule, codec, False, tmp_path)
