"""Master weights and stochastic rounding on shards: the bits of one rank, on any number of ranks and after a resume."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import shardopt
from helpers import CODEC_NAMES, RULES
from ranks.layouts import layouts
from ranks.models import WAYS, make_net
from ranks.pool import Pool
from ranks.runs import Pair, make_optimizer, snapshot_of, step_with
from ranks.snapshot import Snapshot, assert_same
from shardopt.optim import ShardedOptimizer
from slow_cases import slow
from weight_formats import FORMATS

STEPS = 3
#: For what depends little on the dtype.
FEW_FORMATS = [name for name in FORMATS if name != "fp16 32"]


def _sharded_as_whole(rule: str, codecs: list[str], weights: str, block_size: int, third: int | None = None) -> None:
    """With all layouts, or every third one from this on."""
    dtype, options = FORMATS[weights]
    ways = layouts(dist.get_world_size())[slice(third, None, None if third is None else 3)]
    ways = [way._replace(dtype=dtype) for way in ways]
    pair = Pair(rule, codecs, ways, block_size=block_size, **options)
    for step in range(STEPS):
        pair.step(pair.gradients(seed=1000 * (step + 1)))
    pair.compare()


CASES_OF_THIRDS = [(*case, 3 + place % 2, place % 3) for place, case in enumerate(product(["log8", "fp32"], FORMATS))]


@pytest.mark.parametrize(
    ("codec", "weights", "world_size", "third"),
    [
        ("log8", "bf16 24", 4, None),
        ("log8", "bf16 stochastic", 3, None),
        *CASES_OF_THIRDS,
        *slow(product(["log8", "fp32"], FORMATS, (1, 2, 3, 4), (None,))),
    ],
)
def test_sharded_as_whole(ranks: Pool, codec: str, weights: str, world_size: int, third: int | None) -> None:
    """By default low bits and stochastic rounding meet all layouts once, each other case a third of them."""
    ranks.run(world_size, _sharded_as_whole, "adamw", [codec], weights, 128, third)


@pytest.mark.parametrize(
    ("world_size", "rule", "third"),
    [(3, "nesterov", 0), (4, "sgd", 1), *slow([(3, "nesterov", None), (4, "sgd", None)])],
)
def test_small_blocks_and_all_codecs(ranks: Pool, world_size: int, rule: str, third: int | None) -> None:
    ranks.run(world_size, _sharded_as_whole, rule, list(CODEC_NAMES), "bf16 stochastic", 32, third)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("block_size", [16, 128, 4096])
@pytest.mark.parametrize("rule", RULES)
def test_sweep(ranks: Pool, rule: str, block_size: int, weights: str, world_size: int) -> None:
    ranks.run(world_size, _sharded_as_whole, rule, list(CODEC_NAMES), weights, block_size)


def trained(way: str, steps: int, weights: str, codec: str = "log8") -> tuple[nn.Module, ShardedOptimizer]:
    """The model sharded in one of the ``WAYS`` and its optimizer, after so many steps."""
    dtype, options = FORMATS[weights]
    model = WAYS[way](make_net(dtype))
    optimizer = make_optimizer(way, model, codec=codec, **options)
    for step in range(steps):
        step_with(model, optimizer, step)
    return model, optimizer


@lru_cache(maxsize=32)
def _single(steps: int, weights: str) -> Snapshot:
    """An unsharded run's snapshot; each is taken once per process."""
    return snapshot_of(*trained("single", steps, weights))


MODELS = [
    (1, "fsdp", "bf16 24"),
    (1, "tp", "bf16 32"),
    (2, "fsdp", "bf16 stochastic"),
    (2, "fsdp columns", "fp16 24"),
    (2, "ddp", "fp16 32"),
    (3, "fsdp", "bf16 24"),
    (3, "fsdp columns", "bf16 32"),
    (3, "tp", "bf16 stochastic"),
    (4, "fsdp", "fp16 24"),
    (4, "fsdp tp", "fp16 32"),
    (4, "fsdp columns tp", "bf16 24"),
    (4, "hsdp columns", "bf16 32"),
]
ALL_MODELS = [(*case[:2], weights) for case in MODELS for weights in FORMATS]


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "way", "weights"), [*MODELS, *slow(ALL_MODELS, besides=MODELS)])
def test_models(world_size: int, way: str, weights: str) -> None:
    assert_same(snapshot_of(*trained(way, STEPS, weights)), _single(STEPS, weights))


OPTIONS = {
    "sharded": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "from rank 0": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
}


def _round_trip(way: str, weights: str, options: dict[str, bool]) -> None:
    model, optimizer = trained(way, STEPS, weights)
    asked = StateDictOptions(**{**options, "broadcast_from_rank0": False})
    tensors = get_model_state_dict(model, options=asked), get_optimizer_state_dict(model, optimizer, options=asked)
    loaded, loaded_optimizer = trained(way, 0, weights)
    set_model_state_dict(loaded, tensors[0], options=StateDictOptions(**options))
    set_optimizer_state_dict(loaded, loaded_optimizer, tensors[1], options=StateDictOptions(**options))
    for each in (model, optimizer), (loaded, loaded_optimizer):
        step_with(*each, STEPS)
    assert_same(snapshot_of(loaded, loaded_optimizer), snapshot_of(model, optimizer))


ROUND_TRIPS = [
    ("bf16 24", "sharded"),
    ("bf16 32", "flattened"),
    ("bf16 stochastic", "full"),
    ("fp16 24", "from rank 0"),
]


@pytest.mark.parametrize(
    ("weights", "options"), [*ROUND_TRIPS, *slow(product(FEW_FORMATS, OPTIONS), besides=ROUND_TRIPS)]
)
@pytest.mark.parametrize(("world_size", "way"), [(2, "fsdp columns"), pytest.param(3, "fsdp", marks=pytest.mark.slow)])
def test_round_trip(ranks: Pool, world_size: int, way: str, weights: str, options: str) -> None:
    ranks.run(world_size, _round_trip, way, weights, OPTIONS[options])


def _tensors(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _save(way: str, weights: str, path: Path) -> None:
    dcp.save(_tensors(*trained(way, STEPS, weights)), checkpoint_id=path)


def _resume(way: str, weights: str, path: Path) -> None:
    model, optimizer = trained(way, 0, weights)
    tensors = _tensors(model, optimizer)
    dcp.load(tensors, checkpoint_id=path)
    set_model_state_dict(model, tensors["model"])
    set_optimizer_state_dict(model, optimizer, tensors["optimizer"])
    step_with(model, optimizer, STEPS)
    assert_same(snapshot_of(model, optimizer), _single(STEPS + 1, weights))


@pytest.mark.parametrize("weights", FEW_FORMATS)
@pytest.mark.parametrize(
    ("saved_on", "saved_way"),
    [
        (2, "fsdp"),
        pytest.param(3, "fsdp columns", marks=pytest.mark.slow),
        pytest.param(1, "single", marks=pytest.mark.slow),
    ],
)
def test_resume_elsewhere(ranks: Pool, tmp_path: Path, saved_on: int, saved_way: str, weights: str) -> None:
    """Every other target each, in turn; test_resharding.py has all of them, without weight formats."""
    ranks.run(saved_on, _save, saved_way, weights, tmp_path)
    targets = [(1, "single"), (3, "fsdp"), (2, "fsdp columns"), (4, "fsdp tp")]
    for world_size, way in targets[FEW_FORMATS.index(weights) % 2 :: 2]:
        ranks.run(world_size, _resume, way, weights, tmp_path)


def _save_portable(way: str, weights: str, path: Path) -> None:
    shardopt.checkpoint.save(path, *trained(way, STEPS, weights))


def _resume_portable(way: str, weights: str, path: Path) -> None:
    model, optimizer = trained(way, 1, weights)
    loaded = shardopt.checkpoint.load(path, model, optimizer)
    assert loaded.converted == {}
    step_with(model, optimizer, STEPS)
    assert_same(snapshot_of(model, optimizer), _single(STEPS + 1, weights))


@pytest.mark.parametrize("weights", ["bf16 24", "fp16 24", "fp16 32"])
def test_portable_checkpoint(ranks: Pool, tmp_path: Path, weights: str) -> None:
    """From a column shard to all others, and back from a flat one."""
    ranks.run(3, _save_portable, "fsdp columns", weights, tmp_path / "columns")
    for world_size, way in [(2, "ddp"), (3, "fsdp"), (3, "tp"), (2, "fsdp1"), (4, "fsdp1 flat"), (2, "zero")]:
        ranks.run(world_size, _resume_portable, way, weights, tmp_path / "columns")
    ranks.run(3, _save_portable, "fsdp1 flat", weights, tmp_path / "flat")
    ranks.run(2, _resume_portable, "fsdp columns", weights, tmp_path / "flat")
