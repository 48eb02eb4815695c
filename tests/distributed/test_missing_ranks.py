"""Calls that only some ranks make: they name the ranks that do not come, and change nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardopt
from helpers import everything
from ranks.models import WAYS, make_net
from ranks.runs import step_with, trained
from ranks.snapshot import assert_same
from shardopt.checkpoint import CheckpointError, import_state
from shardopt.layout import meet
from shardopt.layout.rank_group import MissingRanksError
from shardopt.sharding.rank_group import WAIT_FOR_RANKS, rank_group_of

#: The way to shard, and the call.
CALLS: dict[str, tuple[str, Callable[[Path, nn.Module, Any], object]]] = {
    "save of plain tensors": ("single", shardopt.checkpoint.save),
    "save of ddp": ("ddp", shardopt.checkpoint.save),
    "save of fsdp": ("fsdp", shardopt.checkpoint.save),
    "load": ("fsdp", shardopt.checkpoint.load),
    "async_save": ("ddp", lambda *given: shardopt.checkpoint.async_save(*given).result()),
    "load_state_dict": ("fsdp1", lambda path, model, optimizer: optimizer.load_state_dict(optimizer.state_dict())),
    "import_state": ("fsdp columns", lambda path, model, optimizer: import_state(optimizer, _state_of_torch(model))),
    "clip_grad_norm_": ("fsdp", lambda path, model, optimizer: shardopt.clip_grad_norm_(model.parameters(), 1.0)),
    "step of fsdp": ("fsdp", lambda path, model, _: shardopt.AdamW8bit(model.parameters()).step()),
    "step of lr=0": ("fsdp", lambda path, model, _: shardopt.AdamW8bit(model.parameters(), lr=0.0).step()),
    "step of fsdp1": ("fsdp1", lambda path, model, _: shardopt.AdamW8bit(model.parameters()).step()),
    "ordered_gradients": ("ddp", lambda path, model, _: shardopt.comm.ordered_gradients(model, micro_batches=3)),
}


def _state_of_torch(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return optimizer.state_dict()


@contextmanager
def _limit(seconds: float) -> Iterator[list[str]]:
    """Calls wait so long for other ranks; what is logged meanwhile."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardopt")
    logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WAIT_FOR_RANKS, str(seconds))
        patch.setattr("shardopt.sharding.rank_group._meetings", WeakKeyDictionary())  # some calls meet only once
        yield logged
    logger.removeHandler(handler)


def _keys() -> int:
    """How many keys torch.distributed's store has."""
    dist.barrier()
    keys = dist.distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    return keys


@pytest.mark.ranks(3, timeout=60)
@pytest.mark.parametrize("case", CALLS)
def test_a_call_on_one_rank(tmp_path: Path, case: str) -> None:
    """The others train on, so that a collective of the call would get the data of theirs."""
    (way, call), name = CALLS[case], case.partition(" ")[0]
    error = CheckpointError if name in ("save", "async_save", "load") else MissingRanksError
    model, optimizer = trained(way, 1)
    if name == "load":
        shardopt.checkpoint.save(tmp_path, model, optimizer)
    before = everything(optimizer)
    with _limit(0.6) as logged:
        if dist.get_rank() == 0:
            with pytest.raises(error, match=f"got no call of {name} on ranks 1, 2 in 0.6 seconds, expected all 3 rank"):
                call(tmp_path, model, optimizer)
            assert logged == [f"{name} waits for ranks 1, 2: all ranks must call it"]
        dist.all_reduce(torch.zeros(1 << 16))
        assert_same(everything(optimizer), before)
        step_with(model, optimizer, 1)
    for _ in range(1 if name == "ordered_gradients" else 2):  # the ranks that failed and the others go on together
        call(tmp_path, model, optimizer)
        step_with(model, optimizer, 2)


@pytest.mark.ranks(3)
def test_extra_values_that_differ_are_logged(tmp_path: Path) -> None:
    model, rank = WAYS["fsdp"](make_net()), dist.get_rank()
    for name, value in (("epoch", 3), ("seed", rank)):
        with _limit(60.0) as logged:
            shardopt.checkpoint.save(tmp_path, model, **{name: value})
        text = "save got extra values that differ between ranks (of seed), and saves rank 0's; gather them before"
        assert logged == ([text] if name == "seed" and rank == 0 else [])
    assert shardopt.checkpoint.load(tmp_path, model).extra == {"seed": 0}


@pytest.mark.ranks(3)
def test_a_rank_that_is_late(tmp_path: Path) -> None:
    """One rank says so, once; afterwards the store has no key of the call."""
    model = WAYS["ddp"](make_net())
    keys = _keys()
    with _limit(6.0) as logged:
        if dist.get_rank() == 1:
            time.sleep(3.5)
        shardopt.checkpoint.save(tmp_path, model)
    gathered: list[list[str]] = [[], [], []]
    dist.all_gather_object(gathered, logged)
    assert [*chain(*gathered)] == ["save waits for rank 1: all ranks must call it"]
    with _limit(60.0) as logged:
        for _ in range(3):
            shardopt.checkpoint.save(tmp_path, model)
        assert logged == []
    assert _keys() == keys


@pytest.mark.ranks(3)
def test_a_meeting_of_some_ranks() -> None:
    """Each rank waits in two groups of two, of which one lacks a rank; then in those of all."""
    groups = {pair: dist.new_group(pair) for pair in ((0, 1), (0, 2), (1, 2))}
    pairs = [rank_group_of(group) for pair, group in groups.items() if dist.get_rank() in pair]
    with _limit(1.0):
        meet(pairs, "first")
        if dist.get_rank() != 2:
            with pytest.raises(MissingRanksError, match="got no call of second on rank 2 in"):
                meet(pairs, "second")
        dist.barrier()
        meet(pairs, "second")
        for _ in range(2):
            meet(pairs, "third", once=True)
        if dist.get_rank() == 0:
            meet(pairs, "third", once=True)


@pytest.mark.ranks(2)
def test_a_rank_that_is_interrupted(tmp_path: Path) -> None:
    """The other rank does not go on without it: it meets the rank when that comes again."""
    model = WAYS["ddp"](make_net())
    with _limit(20.0), pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr("shardopt.sharding.rank_group.time.sleep", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                shardopt.checkpoint.save(tmp_path, model)
        dist.barrier()
    shardopt.checkpoint.save(tmp_path, model)


@pytest.mark.ranks(2)
def test_as_long_as_collectives_wait(tmp_path: Path) -> None:
    """For an hour here, by a clock that is 1,000 times too fast."""
    store, clock = dist.distributed_c10d._get_default_store(), time.monotonic
    before = store.timeout
    store.set_timeout(timedelta(hours=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardopt.sharding.rank_group.time.monotonic", lambda: 1000 * clock())
        if dist.get_rank() == 1:
            time.sleep(1.2)
        shardopt.checkpoint.save(tmp_path, make_net())
    store.set_timeout(before)


@pytest.mark.ranks(2)
def test_a_limit_that_is_no_number(tmp_path: Path) -> None:
    for setting in ("soon", "0", "nan"):
        refused = pytest.raises(ValueError, match=f"{WAIT_FOR_RANKS}: got '{setting}', expected seconds above 0")
        with pytest.MonkeyPatch.context() as patch, refused:
            patch.setenv(WAIT_FOR_RANKS, setting)
            shardopt.checkpoint.save(tmp_path, make_net())
