"""Replicas that share Muon's work (HSDP, HYBRID_SHARD): each matrix is computed once, with the bits of one rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from helpers import Shape
from ranks.models import WAYS, make_net, named_parameters, set_gradients
from ranks.muon import MATRICES, of_groups, orthogonalized
from ranks.pool import Pool
from ranks.runs import snapshot_of, step_with
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer

STEPS = 3
SHARED = {"share_replicas": True}


def _as_single(way: str, options: dict[str, Any]) -> list[Shape]:
    models = [WAYS[way](make_net()), make_net()]
    optimizers = [of_groups(model, **options) for model in models]
    with orthogonalized() as computed:
        for step in range(STEPS):
            step_with(models[0], optimizers[0], step)
    own = list(computed)
    for step in range(STEPS):
        step_with(models[1], optimizers[1], step)
    got, expected = (snapshot_of(m, o) for m, o in zip(models, optimizers, strict=True))
    assert_same(got, expected)
    return own


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("hsdp", {}),
        ("hsdp", {"orthogonalize_memory": 1}),
        ("hsdp", {"normalize": "rows", "orthogonalize_memory": 100_000}),
        ("hsdp columns", {}),
        ("fsdp1 hybrid", {}),
        ("fsdp1 hybrid", {"normalize": "rows"}),
        ("hsdp of one", {}),
    ],
    ids=str,
)
def test_each_matrix_once(ranks: Pool, way: str, options: dict[str, Any]) -> None:
    computed = ranks.run(4, _as_single, way, {**SHARED, **options})
    assert sum(map(Counter, computed), Counter()) == Counter({shape: STEPS * n for shape, n in MATRICES.items()})
    assert sum(map(bool, computed)) > 2, "ranks of both replicas"


def test_each_replica_computes_all_by_default(ranks: Pool) -> None:
    computed = ranks.run(4, _as_single, "hsdp", {})
    assert sum(map(Counter, computed), Counter()) == Counter({s: 2 * STEPS * n for s, n in MATRICES.items()})


def _in_all_groups(optimizer: ShardedOptimizer, **options: Any) -> None:
    for group in optimizer.param_groups:
        group.update(options)


def _without() -> None:
    """In some steps some parameters have no gradient anywhere; options change on all ranks."""
    models = [WAYS["hsdp"](make_net()), make_net()]
    optimizers = [of_groups(model, **SHARED) for model in models]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            set_gradients(model, step)
            for name, param in named_parameters(model).items():
                if step == 1 and name == "down.weight":
                    param.grad = None
            if step == 2:
                _in_all_groups(optimizer, ns_steps=3)
            optimizer.step()
            optimizer.zero_grad()
    got, expected = (snapshot_of(m, o) for m, o in zip(models, optimizers, strict=True))
    assert_same(got, expected)


def test_gradients_come_and_go(ranks: Pool) -> None:
    ranks.run(4, _without)


def _differ(way: str, what: str) -> None:
    """One replica's second step is another one: all ranks raise, and none waits."""
    model = WAYS[way](make_net())
    optimizer = of_groups(model, **SHARED)
    step_with(model, optimizer, 0)
    set_gradients(model, 1)
    if dist.get_rank() >= 2:
        if what == "options":
            _in_all_groups(optimizer, ns_steps=3)
        else:
            named_parameters(model)["down.weight"].grad = None
    with pytest.raises(RuntimeError, match="got ranks that differ in"):
        optimizer.step()


@pytest.mark.parametrize("what", ["options", "gradients"])
@pytest.mark.parametrize("way", ["hsdp", "hsdp columns"])
def test_replicas_that_differ(ranks: Pool, way: str, what: str) -> None:
    """Also where other parameters' blocks are cut, whose messages stay within a replica."""
    ranks.run(4, _differ, way, what)


def _share_alone(way: str) -> None:
    """One replica shares matrices with another that does not: all ranks say so in the first step."""
    model = WAYS[way](make_net())
    optimizer = of_groups(model, share_replicas=dist.get_rank() < 2)
    before = snapshot_of(model, optimizer)
    set_gradients(model, 0)
    with pytest.raises(RuntimeError, match=r"share_replicas of .*: True on rank 0 and False on rank 2"):
        optimizer.step()
    assert_same(snapshot_of(model, optimizer), before)


@pytest.mark.parametrize("way", ["hsdp", "hsdp columns", "fsdp1 hybrid"])
def test_one_replica_shares(ranks: Pool, way: str) -> None:
    ranks.run(4, _share_alone, way)


def _apart() -> None:
    """Replicas that share nothing may take other steps, and change options, without each other."""
    model = WAYS["hsdp"](make_net())
    optimizer = of_groups(model)
    replica = dist.get_rank() // 2
    for step in range(2 + replica):
        set_gradients(model, step)
        if step == 1 and replica:
            _in_all_groups(optimizer, ns_steps=3)
        optimizer.step()
    _in_all_groups(optimizer, **SHARED)  # from now on, all replicas take the same steps
    _in_all_groups(optimizer, ns_steps=5)
    for step in range(2):
        set_gradients(model, step)
        optimizer.step()


def test_replicas_apart(ranks: Pool) -> None:
    ranks.run(4, _apart)
