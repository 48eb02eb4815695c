"""Ranks that fail or die while they save or load, and state that is damaged on one: all refuse, nothing changes."""

from __future__ import annotations

import copy
import errno
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import shardopt
from attack.index_file import INDEX
from checkpoint_folder import LOCK, data_files, flip
from helpers import everything
from ranks.models import WAYS, make_net, named_parameters
from ranks.pool import Pool, RankFailure
from ranks.runs import step_with, trained
from ranks.snapshot import assert_same
from shardopt.checkpoint import CheckpointError, import_state
from shardopt.checkpoint.errors import LostRanksError
from shardopt.checkpoint.ranks import Ranks
from shardopt.optim import ShardedOptimizer


def _save(path: Path, way: str, seed: int) -> None:
    shardopt.checkpoint.save(path, WAYS[way](make_net(seed=seed)), seed=seed)


def _load(path: Path, way: str, seed: int) -> None:
    model = WAYS[way](make_net(seed=99))
    assert shardopt.checkpoint.load(path, model).extra == {"seed": seed}
    found = {name: getattr(p, "full_tensor", p.detach)() for name, p in named_parameters(model).items()}
    assert_same(found, dict(make_net(seed=seed).named_parameters()))


def error_of(function: Callable[..., None], *args: Any) -> str:
    """The message of a CheckpointError."""
    with pytest.raises(CheckpointError) as caught:
        function(*args)
    return str(caught.value)


def told(messages: list[str], *failed: int) -> str:
    """The error of the ranks that failed, which the others name with the first such rank."""
    (own,) = {messages[rank] for rank in failed}
    others = {message for rank, message in enumerate(messages) if rank not in failed}
    assert len(others) == (len(failed) < len(messages))
    for message in others:
        prefix = f"got an error on rank {failed[0]} and {len(failed) - 1} others, nothing was done: "
        assert message == f"{prefix}CheckpointError: {own}"
    return own


def assert_only(ranks: Pool, path: Path, seed: int) -> None:
    """The checkpoint of this seed is in the folder, and nothing else."""
    assert sorted(os.listdir(path)) == sorted([*data_files(path), INDEX, LOCK])
    ranks.run(2, _load, path, "fsdp", seed)


class Death(NamedTuple):
    """A rank is gone when it comes to a call of a function of the system, after so many calls of it."""

    rank: int
    name: str
    calls: int


def _save_without_room(path: Path, way: str, seed: int, full: int) -> str:
    """The disk of one rank is full."""
    with _replaced_on(full, "pwrite", 0, _no_room):
        return error_of(_save, path, way, seed)


def _save_and_die(path: Path, way: str, seed: int, death: Death) -> None:
    with _replaced_on(death.rank, death.name, death.calls, partial(os._exit, 9)):
        _save(path, way, seed)


def _no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _replaced_on(rank: int, name: str, calls: int, after: Callable[[], None]) -> Iterator[None]:
    """On one rank a function of the system works so many times."""
    original, count = getattr(os, name), itertools.count()

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if next(count) >= calls:
            after()
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(os, name, replacement)
        yield


@pytest.mark.parametrize("full", [0, 1])
def test_disk_full(ranks: Pool, tmp_path: Path, full: int) -> None:
    ranks.run(2, _save, tmp_path, "fsdp", 1)
    message = told(ranks.run(2, _save_without_room, tmp_path, "fsdp columns", 2, full), full)
    assert re.fullmatch(rf"{tmp_path}/\w+-{full}\.bin: cannot write \d+ bytes: No space .*", message)
    assert_only(ranks, tmp_path, 1)
    ranks.run(3, _save, tmp_path, "fsdp columns", 2)
    assert_only(ranks, tmp_path, 2)


@pytest.mark.parametrize(
    ("death", "committed"),
    [
        (Death(1, "pwrite", 0), False),
        (Death(0, "remove", 0), True),  # of the old data
    ],
)
def test_a_rank_dies_while_saving(ranks: Pool, tmp_path: Path, death: Death, committed: bool) -> None:
    ranks.run(2, _save, tmp_path, "fsdp", 1)
    with pytest.raises(RankFailure, match=f"rank {death.rank} of 2 died with exit code 9"):
        ranks.run(2, _save_and_die, tmp_path, "fsdp columns", 2, death)
    assert len(os.listdir(tmp_path)) > 3
    ranks.run(3, _load, tmp_path, "tp", 2 if committed else 1)
    ranks.run(3, _save, tmp_path, "fsdp columns", 3)
    assert_only(ranks, tmp_path, 3)


def _load_error(path: Path) -> str:
    return error_of(_load, path, "fsdp", 1)


def test_what_one_rank_finds_all_say(ranks: Pool, tmp_path: Path) -> None:
    assert f"{tmp_path}: there is no" in told(ranks.run(2, _load_error, tmp_path), 0, 1)
    ranks.run(2, _save, tmp_path, "fsdp", 1)
    (path,) = tmp_path.glob("*-1.bin")
    flip(path, 0)
    assert re.match(rf"{path}: got checksum \w+ of", told(ranks.run(2, _load_error, tmp_path), 1))
    path.unlink()
    assert re.fullmatch(rf"{path}: cannot be found .*", told(ranks.run(3, _load_error, tmp_path), 1, 2))


@pytest.mark.ranks(2)
def test_ranks_that_are_lost_while_the_host_waits() -> None:
    """NCCL's collectives return at once, and fail where their result is read; a meta tensor cannot be read either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardopt.checkpoint.ranks.device_of", lambda group: torch.device("meta"))
        for collective in ("all_gather", "broadcast"):
            patch.setattr(f"shardopt.sharding.rank_group.{collective}", lambda *args, **options: Mock())
        ranks = Ranks()
        calls = (lambda: ranks.all_gather(b"x"), lambda: ranks.broadcast(0, b"x"), lambda: ranks.agree(lambda: None))
        for call in calls:
            with pytest.raises(LostRanksError, match="cannot talk to each other any more"):
                call()


def _lose_a_rank_while_committing(path: Path) -> None:
    """Rank 0 completes the checkpoint, and the ranks hear no more of each other."""
    agree = Ranks.agree

    def alone(ranks: Ranks, work: Any) -> Any:
        if "_commit" not in work.__code__.co_names:
            return agree(ranks, work)
        if dist.get_rank() == 0:
            work()
        raise LostRanksError("the ranks cannot talk to each other any more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "agree", alone)
        with pytest.raises(LostRanksError):
            _save(path, "fsdp", 2)


def test_ranks_that_are_lost_while_the_first_commits(ranks: Pool, tmp_path: Path) -> None:
    """Lost ranks leave their data files, which may be part of the checkpoint."""
    ranks.run(2, _save, tmp_path, "fsdp", 1)
    ranks.run(2, _lose_a_rank_while_committing, tmp_path)
    ranks.run(1, _load, tmp_path, "single", 2)


@pytest.mark.ranks(2)
def test_asynchronous_saves_that_overlap(tmp_path: Path) -> None:
    """Collectives come one after another, on all ranks in one order."""
    model = WAYS["fsdp"](make_net(seed=1))
    saves = [shardopt.checkpoint.async_save(tmp_path / f"step-{step}", model, seed=1) for step in range(4)]
    for step, save in enumerate(saves):
        save.result(timeout=120)
        _load(tmp_path / f"step-{step}", "fsdp", 1)


def _first(state_dict: dict[str, Any], *entries: str) -> tuple[dict[str, Any], str, Tensor]:
    """The first state with one of these entries of which this rank has a part; the entry, and the part."""
    for state in state_dict["state"].values():
        for key in entries:
            if key in state:
                local = state[key].to_local() if isinstance(state[key], DTensor) else state[key]
                if local.numel():
                    return state, key, local
    raise AssertionError(f"no {entries}")


def _damage(state_dict: dict[str, Any], what: str) -> None:
    if what == "lr":
        state_dict["param_groups"][0]["lr"] = math.nan
    elif what == "param groups":
        state_dict["param_groups"] = None
    elif "." not in what:
        state, key, local = _first(state_dict, "exp_avg_scales", "exp_avg")
        if what == "value":
            local.view(-1)[0] = math.nan
        elif what == "step":
            state["step"] = torch.tensor(-5.0)
        else:
            del state[key]


#: Where the state is from, what is wrong with it on the last rank, what that rank says, and what takes the state.
DAMAGED: list[tuple[str, str, str, str, Callable[..., Any]]] = [
    ("fsdp1", "ours", "tensor_spec.TensorSpec.state_from_loaded", "out of memory", ShardedOptimizer.load_state_dict),
    ("fsdp1", "torch", "encoding._local_extremes", "out of memory", ShardedOptimizer.load_state_dict),
    ("fsdp1 flat", "ours", "step", "got step as -5.0", ShardedOptimizer.load_state_dict),
    ("fsdp1 flat", "torch", "value", "NaN", ShardedOptimizer.load_state_dict),
    ("fsdp columns", "ours", "missing", "got", ShardedOptimizer.load_state_dict),
    ("fsdp columns", "torch", "slice_spec.encode_moments", "out of memory", ShardedOptimizer.load_state_dict),
    ("fsdp1", "momentum", "lr", "param group 0: lr: got nan", ShardedOptimizer.load_state_dict),
    ("fsdp columns", "momentum", "param groups", "param_groups as NoneType", ShardedOptimizer.load_state_dict),
    ("fsdp columns", "torch", "value", "got exp_avg that stands for NaN", import_state),
]


@pytest.mark.ranks(3, timeout=30)
@pytest.mark.parametrize(("way", "source", "what", "message", "load"), DAMAGED)
def test_all_ranks_refuse(way: str, source: str, what: str, message: str, load: Callable[..., Any]) -> None:
    """State that the last rank has damaged, or for whose codes or copies it has no memory; torch's is in floats.

    The source "momentum" has moments of which the optimizer has none before.
    """
    is_last = dist.get_rank() == dist.get_world_size() - 1
    model, optimizer = trained(way, 1, "sgd" if source == "momentum" else "adamw")
    theirs: torch.optim.Optimizer = optimizer
    if source == "torch":
        theirs = torch.optim.AdamW(model.parameters())
        step_with(model, theirs, 1)
    elif source == "momentum":
        _, theirs = trained(way, 1, "momentum")
    state_dict = copy.deepcopy(theirs.state_dict())
    before = everything(optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if is_last:
            _damage(state_dict, what)
            if "." in what:
                patch.setattr(f"shardopt.state.{what}", Mock(side_effect=torch.OutOfMemoryError("out of memory")))
        with pytest.raises((ValueError, torch.OutOfMemoryError)) as caught:
            load(optimizer, state_dict)
    said = str(caught.value)
    assert message in said
    assert is_last != ("got an error on rank 2: " in said)
    assert_same(everything(optimizer), before)
    step_with(model, optimizer, 2)


@pytest.mark.ranks(3, timeout=30)
def test_float_moments_on_some_ranks_only() -> None:
    model, optimizer = trained("fsdp columns", 1)
    theirs = torch.optim.AdamW(model.parameters())
    step_with(model, theirs, 1)
    state_dict = copy.deepcopy(theirs.state_dict())
    if dist.get_rank() == 1:
        state_dict["state"].clear()
    before = everything(optimizer)
    with pytest.raises(ValueError, match="got float moments on some ranks only"):
        optimizer.load_state_dict(state_dict)
    assert_same(everything(optimizer), before)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("way", "convert"), [("fsdp columns", True), ("fsdp1 flat", False)])
def test_no_rank_loads_a_damaged_checkpoint(tmp_path: Path, way: str, convert: bool) -> None:
    """Damage in one rank's part only; the other ranks would wait for it where moments are coded anew."""
    model, optimizer = trained(way, 1)
    if dist.get_rank() == dist.get_world_size() - 1:
        _, _, local = _first({"state": dict(enumerate(optimizer.state.values()))}, "exp_avg")
        local.view(-1)[-1] = math.nan
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    model, optimizer = trained(way, 2, codec="companded8" if convert else "log8")
    before = everything(optimizer)
    with pytest.raises(CheckpointError, match="stands for NaN"):
        shardopt.checkpoint.load(tmp_path, model, optimizer, convert=convert)
    assert_same(everything(optimizer), before)
    step_with(model, optimizer, 2)
