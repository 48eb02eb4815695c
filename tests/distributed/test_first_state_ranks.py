"""A step that makes state alone, under sharding: the ranks that share parameters decide together that it is none."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import shardopt
from ranks.models import set_gradients
from ranks.pool import Pool
from ranks.runs import single, snapshot_of, step_with, trained
from ranks.snapshot import assert_same, assert_same_on_rank_0

STEPS = 2


def _steps_of(optimizer: torch.optim.Optimizer) -> set[float]:
    inner = getattr(optimizer, "optim", optimizer)
    return {float(entries["step"]) for entries in inner.state.values() if entries}


def _init_with_zeros(optimizer: torch.optim.Optimizer) -> None:
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    for group, lr in zip(groups, rates, strict=True):
        group["lr"] = lr
    optimizer.zero_grad()


def _as_without(way: str, rule: str) -> None:
    model, optimizer = trained(way, 0, rule)
    if way == "zero":
        _init_with_zeros(optimizer)
    else:
        saved = get_optimizer_state_dict(model, optimizer)
        if way != "fsdp1 flat":
            set_optimizer_state_dict(model, optimizer, saved)
    assert _steps_of(optimizer) == {0.0}
    for step in range(STEPS):
        step_with(model, optimizer, step)
    if way == "zero":
        assert_same_on_rank_0(snapshot_of(model, optimizer), lambda: single(STEPS, rule))
    else:
        assert_same(snapshot_of(model, optimizer), single(STEPS, rule))


WORLDS = [(2, "ddp"), (3, "fsdp"), (2, "fsdp columns"), (4, "fsdp tp"), (3, "fsdp1"), (2, "fsdp1 flat"), (2, "zero")]


@pytest.mark.parametrize(
    ("world_size", "way", "rule"),
    [*((*world, rule) for world in WORLDS for rule in ("adamw", "prodigy")), (3, "fsdp", "muon"), (3, "fsdp1", "muon")],
)
def test_the_run_is_that_without_it(ranks: Pool, world_size: int, way: str, rule: str) -> None:
    ranks.run(world_size, _as_without, way, rule)


def _counts(way: str) -> None:
    model, optimizer = trained(way, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    set_gradients(model, 0)
    if dist.get_rank() != 1:
        mine = getattr(optimizer, "optim", optimizer).param_groups
        for param in (param for group in mine for param in group["params"] if param.grad is not None):
            getattr(param.grad, "_local_tensor", param.grad).zero_()
    optimizer.step()
    assert _steps_of(optimizer) == {1.0}


@pytest.mark.parametrize("way", ["fsdp", "fsdp columns", "fsdp1", "fsdp1 flat", "zero"])
def test_a_first_step_of_a_warm_up_counts_where_gradients_are_zero(ranks: Pool, way: str) -> None:
    """Of shards whose rows no token has met, or of a rank's parameters under ZeRO."""
    ranks.run(2, _counts, way)


def _in_another_order(way: str) -> None:
    kept = {}
    for turn in (1, -1):
        model, _ = trained(way, 0)
        optimizer = shardopt.AdamW8bit(list(model.named_parameters())[::turn], min_quantized_numel=64)
        if turn == 1:
            step_with(model, optimizer, 0)
            kept = {"saved": get_optimizer_state_dict(model, optimizer), "plain": optimizer.state_dict()}
            expected = snapshot_of(model, optimizer)
            continue
        names = optimizer.param_groups[0]["param_names"]
        for name, load in (
            ("saved", partial(set_optimizer_state_dict, model, optimizer)),
            ("plain", optimizer.load_state_dict),
        ):
            load(kept[name])
            assert optimizer.param_groups[0]["param_names"] == names
            state = {key: x for key, x in snapshot_of(model, optimizer).items() if "/" in key}
            assert_same(state, {key: x for key, x in expected.items() if "/" in key})


@pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp1"])
def test_named_state_in_another_order(ranks: Pool, way: str) -> None:
    """torch's functions number parameters by themselves, and leave the saved names in their order."""
    ranks.run(2, _in_another_order, way)
