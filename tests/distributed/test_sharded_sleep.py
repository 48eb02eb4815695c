"""offload(), reload() and reset_state() under every kind of shard: the bits of a run that never slept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import shardopt
from ranks.models import WAYS, make_net
from ranks.offload import offload_from_cpu
from ranks.pool import Pool
from ranks.runs import make_optimizer, single, snapshot_of, step_with, trained
from ranks.snapshot import assert_same

STEPS = 4


def _placements(optimizer: Any) -> list[Any]:
    return [
        (key, tuple(x.shape), getattr(x, "placements", None))
        for state in optimizer.state.values()
        for key, x in state.items()
    ]


def _as_without(way: str, options: dict[str, Any]) -> None:
    expected = snapshot_of(*trained(way, STEPS, **options))
    with offload_from_cpu():
        model, optimizer = trained(way, 1, **options)
        before = _placements(optimizer)
        for step in range(1, STEPS):
            optimizer.offload()
            assert _placements(optimizer) == before
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            if step != 3:  # the step wakes the state itself
                optimizer.reload()
                assert _placements(optimizer) == before
            step_with(model, optimizer, step)
        assert_same(snapshot_of(model, optimizer), expected)


@pytest.mark.parametrize(
    ("way", "world_size"),
    [
        *((way, 2) for way in ("ddp", "fsdp", "fsdp offload", "fsdp1", "fsdp1 flat", "tp")),
        ("fsdp columns", 3),
        ("hsdp", 4),
    ],
)
def test_same_bits(ranks: Pool, way: str, world_size: int) -> None:
    ranks.run(world_size, _as_without, way, {})


@pytest.mark.parametrize("way", ["fsdp", "fsdp1"])
@pytest.mark.parametrize("options", [{"codec": "fp32"}, {"codec": "log4"}])
def test_codecs(ranks: Pool, way: str, options: dict[str, Any]) -> None:
    ranks.run(2, _as_without, way, options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_torchs_state_dicts(way: str) -> None:
    """Taken and given while asleep."""
    with offload_from_cpu():
        model, optimizer = trained(way, 2)
        other = WAYS[way](make_net(seed=1))
        loaded = make_optimizer(way, other)
        step_with(other, loaded, 9)
        for each in (optimizer, loaded):
            each.offload()
        set_optimizer_state_dict(other, loaded, get_optimizer_state_dict(model, optimizer))
        other.load_state_dict(model.state_dict())
        assert loaded._internals.residency.asleep
        step_with(other, loaded, 2)
        assert_same(snapshot_of(other, loaded), single(3))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["fsdp", "fsdp1", "fsdp1 flat"])
def test_portable_checkpoint(way: str, tmp_path: Path) -> None:
    with offload_from_cpu():
        model, optimizer = trained(way, 2)
        optimizer.offload()
        shardopt.checkpoint.save(tmp_path, model, optimizer)
        other, loaded = trained(way, 1, seed=1)
        loaded.offload()
        shardopt.checkpoint.load(tmp_path, other, loaded)
        step_with(other, loaded, 2)
        assert_same(snapshot_of(other, loaded), single(3))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp1", "fsdp1 flat"])
def test_reset_state(way: str) -> None:
    """Blocks that shards cut are agreed on anew."""
    model, optimizer = trained(way, 0)
    step_with(model, optimizer, 0)
    weights = optimizer.full_precision_parameters()
    runs = []
    for begin_anew in (lambda: make_optimizer(way, model), lambda: optimizer):
        optimizer.load_full_precision_parameters(weights)
        optimizer.reset_state()
        stepped = begin_anew()
        for step in (1, 2):
            step_with(model, stepped, step)
        runs.append(snapshot_of(model, stepped))
    assert_same(runs[1], runs[0])
