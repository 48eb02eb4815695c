"""Muon under everything that shards: the bits of one rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardopt
import shardopt.checkpoint
import shardopt.sharding.exchange
from helpers import Shape
from ranks.models import WAYS, loss_of, make_batch, make_net, named_parameters, set_gradients
from ranks.muon import MATRICES, of_groups, orthogonalized
from ranks.pool import Pool
from ranks.runs import make_optimizer, single, snapshot_of, step_with, trained
from ranks.snapshot import assert_same
from slow_cases import slow

STEPS = 3
IN_PAIRS = ("hsdp", "hsdp columns", "fsdp1 hybrid")
NOT_FLAT = [way for way in WAYS if "flat" not in way and way not in ("single", "zero")]
FEW = {
    2: ("fsdp", "fsdp bf16", "fsdp offload", "fsdp1"),
    3: ("fsdp columns", "hsdp of one", "tp", "fsdp1 grad"),
    4: ("fsdp", "hsdp", "hsdp columns", "fsdp tp", "fsdp columns tp", "fsdp1 hybrid", "fsdp1 nested"),
}


def _as_single(way: str, rule: str, options: dict[str, Any]) -> None:
    got = snapshot_of(*trained(way, STEPS, rule, **options))
    if dist.get_rank() == 0:
        assert_same(got, single(STEPS, rule, **options))


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        *((world_size, way) for world_size, ways in FEW.items() for way in ways),
        *slow(
            (world_size, way)
            for world_size in (1, 2, 3, 4)
            for way in NOT_FLAT
            if "tp" not in way and not (world_size % 2 and way in IN_PAIRS)
        ),
    ],
)
def test_as_single(ranks: Pool, world_size: int, way: str) -> None:
    ranks.run(world_size, _as_single, way, "muon_in_waves", {})


@pytest.mark.parametrize(
    ("world_size", "way"),
    [(2, "fsdp bf16"), (3, "fsdp"), (3, "fsdp columns"), (3, "fsdp1"), (4, "fsdp columns tp"), (4, "fsdp1 hybrid")],
)
def test_normalized_as_single(ranks: Pool, world_size: int, way: str) -> None:
    """Second moments of rows included, where ranks share rows, too."""
    ranks.run(world_size, _as_single, way, "normuon", {})


def _in_rounds(most: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(shardopt.sharding.exchange, "MOST_PEERS", most)
        for way in ("fsdp", "fsdp1"):
            _as_single(way, "normuon", {})


@pytest.mark.parametrize(("world_size", "most"), [(3, 1), (4, 2)])
def test_messages_to_few_ranks_at_a_time(ranks: Pool, world_size: int, most: int) -> None:
    ranks.run(world_size, _in_rounds, most)


# Steps that lack something --------------------------------------------------------------------------------------------


def _without(way: str, names: tuple[str, ...], steps: tuple[int, ...]) -> None:
    """In some steps some parameters have no gradient anywhere."""
    models = [WAYS[way](make_net()), make_net()]
    optimizers = [of_groups(model, memory=100_000) for model in models]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            set_gradients(model, step)
            for name, param in named_parameters(model).items():
                if step in steps and name in names:
                    param.grad = None
            optimizer.step()
            optimizer.zero_grad()
    got, expected = (snapshot_of(m, o) for m, o in zip(models, optimizers, strict=True))
    assert_same(got, expected)


@pytest.mark.parametrize("way", ["fsdp", "fsdp columns", "ddp", "fsdp1"])
def test_parameters_without_gradient(ranks: Pool, way: str) -> None:
    everything = tuple(name for name, _ in make_net().named_parameters())
    matrices = ("up.weight", "down.weight", "conv.weight", "gate.weight")
    for names in (("down.weight",), matrices, everything):
        for steps in ((0,), (1,)):
            ranks.run(2, _without, way, names, steps)


def _released(way: str) -> list[Shape]:
    models = [WAYS[way](make_net()) for _ in range(2)]
    released, ordinary = (of_groups(model) for model in models)
    shardopt.release_gradients(models[0], released)
    computed: list[Shape] = []
    for step in range(STEPS):
        for model, optimizer in zip(models, (released, ordinary), strict=True):
            with orthogonalized() as actual:
                loss_of(model, make_batch(step, dist.get_rank())).backward()
                optimizer.step()
            computed += actual if optimizer is released else []
            optimizer.zero_grad()
        got, expected = (snapshot_of(m, o) for m, o in zip(models, (released, ordinary), strict=True))
        assert_same(got, expected)
    return computed


@pytest.mark.parametrize("way", ["fsdp", "fsdp columns", "ddp"])
def test_released_gradients(ranks: Pool, way: str) -> None:
    """Where each step has one matrix, its owner is not always the first rank."""
    computed = ranks.run(2, _released, way)
    assert sum(map(Counter, computed), Counter()) == Counter({shape: STEPS * n for shape, n in MATRICES.items()})
    assert all(computed)


def _nan(way: str, policy: str) -> None:
    """In the part of one rank."""
    models = [WAYS[way](make_net()), make_net()]
    optimizers = [of_groups(model, nonfinite=policy) for model in models]
    before = snapshot_of(models[0], optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        set_gradients(model, 0)
        grad = model.get_parameter("up.weight").grad
        last = dist.get_rank() == dist.get_world_size() - 1
        if model is models[1]:
            grad[-1, -1] = float("nan")
        elif last:
            grad.to_local()[-1, -1] = float("nan")
        if policy == "raise":
            with pytest.raises(FloatingPointError, match="NaN or Inf"):
                optimizer.step()
        else:
            optimizer.step()
    got, expected = (snapshot_of(m, o) for m, o in zip(models, optimizers, strict=True))
    assert_same(got, before if policy == "raise" else expected)


@pytest.mark.parametrize("policy", ["skip", "raise", "propagate"])
@pytest.mark.parametrize("way", ["fsdp", "fsdp columns"])
@pytest.mark.filterwarnings("ignore:skipped .* gradient elements")
def test_nonfinite_gradients(ranks: Pool, way: str, policy: str) -> None:
    ranks.run(2, _nan, way, policy)


# Going on elsewhere ---------------------------------------------------------------------------------------------------


def _save(way: str, rule: str, path: Path) -> None:
    model, optimizer = trained(way, 2, rule)
    shardopt.checkpoint.save(path, model, optimizer)


def _resume(way: str, rule: str, path: Path) -> None:
    """In another model and optimizer, which have taken a step; then beside a run that was never saved."""
    model = WAYS[way](make_net(seed=1))
    optimizer = make_optimizer(way, model, rule)
    step_with(model, optimizer, 99)
    shardopt.checkpoint.load(path, model, optimizer)
    for step in (2, 3):
        step_with(model, optimizer, step)
    got = snapshot_of(model, optimizer)
    if dist.get_rank() == 0:
        assert_same(got, single(4, rule))


@pytest.mark.parametrize("rule", ["muon_in_waves", "normuon"])
@pytest.mark.parametrize(
    ("saved_on", "saved_way", "world_size", "way"),
    [
        (2, "fsdp", 3, "fsdp"),
        (3, "fsdp1", 2, "fsdp columns"),
        (1, "single", 3, "fsdp1"),
        (2, "fsdp columns", 1, "single"),
    ],
)
def test_resume(
    ranks: Pool, tmp_path: Path, saved_on: int, saved_way: str, world_size: int, way: str, rule: str
) -> None:
    ranks.run(saved_on, _save, saved_way, rule, tmp_path / "checkpoint")
    ranks.run(world_size, _resume, way, rule, tmp_path / "checkpoint")
