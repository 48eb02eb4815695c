"""Muon under everything that shards: the bits of one rank."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

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


#: NorMuon has second moments of rows, where ranks share rows, too.
NORMALIZED = {2: ("fsdp bf16",), 3: ("fsdp", "fsdp columns", "fsdp1"), 4: ("fsdp columns tp", "fsdp1 hybrid")}
CASES = [(size, way, "muon_in_waves") for size, ways in FEW.items() for way in ways]
CASES += [(size, way, "normuon") for size, ways in NORMALIZED.items() for way in ways]
IN_ALL = ((size, way) for size in (1, 2, 3, 4) for way in NOT_FLAT if not (size % 2 and way in IN_PAIRS))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "way", "rule"), [*CASES, *slow((*case, "muon_in_waves") for case in IN_ALL if "tp" not in case[1])]
)
def test_as_single(world_size: int, way: str, rule: str) -> None:
    got = snapshot_of(*trained(way, STEPS, rule))
    if dist.get_rank() == 0:
        assert_same(got, single(STEPS, rule))


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "most"), [(3, 1), (4, 2)])
def test_messages_to_few_ranks_at_a_time(world_size: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardopt.sharding.exchange, "MOST_PEERS", most)
        for way in ("fsdp", "fsdp1"):
            test_as_single(world_size, way, "normuon")


# Steps that lack something --------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["fsdp", "fsdp columns", "ddp", "fsdp1"])
def test_parameters_without_gradient(way: str) -> None:
    """In some steps some parameters have no gradient anywhere: one matrix, all of them, everything."""
    matrices = ("up.weight", "down.weight", "conv.weight", "gate.weight")
    for names, without in product((("down.weight",), matrices, None), (0, 1)):
        models = [WAYS[way](make_net()), make_net()]
        optimizers = [of_groups(model, memory=100_000) for model in models]
        for step in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                set_gradients(model, step)
                for name, param in named_parameters(model).items():
                    if step == without and (names is None or name in names):
                        param.grad = None
                optimizer.step()
                optimizer.zero_grad()
        got, expected = (snapshot_of(m, o) for m, o in zip(models, optimizers, strict=True))
        assert_same(got, expected)


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("way", "policy"), [("fsdp", "skip"), ("fsdp", "raise"), ("fsdp columns", "propagate")])
@pytest.mark.filterwarnings("ignore:skipped .* gradient elements")
def test_nonfinite_gradients(way: str, policy: str) -> None:
    """In the part of one rank."""
    models = [WAYS[way](make_net()), make_net()]
    optimizers = [of_groups(model, nonfinite=policy) for model in models]
    before = snapshot_of(models[0], optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        set_gradients(model, 0)
        grad = model.get_parameter("up.weight").grad
        if model is models[1]:
            grad[-1, -1] = float("nan")
        elif dist.get_rank() == dist.get_world_size() - 1:
            grad.to_local()[-1, -1] = float("nan")
        if policy == "raise":
            with pytest.raises(FloatingPointError, match="NaN or Inf"):
                optimizer.step()
        else:
            optimizer.step()
    got, expected = (snapshot_of(m, o) for m, o in zip(models, optimizers, strict=True))
    assert_same(got, before if policy == "raise" else expected)


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


@pytest.mark.parametrize(
    ("saved_on", "saved_way", "world_size", "way", "rule"),
    [
        (2, "fsdp", 3, "fsdp", "normuon"),
        (3, "fsdp1", 2, "fsdp columns", "normuon"),
        (1, "single", 3, "fsdp1", "muon_in_waves"),
        (2, "fsdp columns", 1, "single", "normuon"),
    ],
)
def test_resume(
    ranks: Pool, tmp_path: Path, saved_on: int, saved_way: str, world_size: int, way: str, rule: str
) -> None:
    ranks.run(saved_on, _save, saved_way, rule, tmp_path / "checkpoint")
    ranks.run(world_size, _resume, way, rule, tmp_path / "checkpoint")
