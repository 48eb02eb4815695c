"""Portable checkpoints of DeepSpeed engines beside ``test_deepspeed.py``: to and from torch, and in special cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardopt
from ranks.deepspeed import (
    HYPER,
    OFFLOAD,
    ROUND_ROBIN,
    STEPS,
    WORST,
    config,
    engine_snapshot,
    goes_on_as_whole,
    load_portable,
    make_engine,
    make_whole,
    model_parameters,
    save_portable,
    step_engine,
    step_whole,
    stepped_engine,
    stepped_whole,
    twins,
    whole_snapshot,
)
from ranks.models import loss_of, make_batch, make_frozen, make_net
from ranks.pool import Pool
from ranks.runs import snapshot_of, trained
from ranks.snapshot import assert_same
from shardopt.checkpoint import CheckpointError
from slow_cases import slow

Zero = dict[str, Any]


def _config(stage: int) -> dict[str, Any]:
    return config(stage, zero=WORST[stage])


def _load_in_torch(path: Path, way: str) -> None:
    model, optimizer = trained(way, 1, seed=1)
    loaded = shardopt.checkpoint.load(path, model, optimizer)
    assert loaded.converted == {}
    assert_same(snapshot_of(model, optimizer), whole_snapshot(*stepped_whole(config(0), STEPS)))


def _save_in_torch(path: Path, way: str) -> None:
    shardopt.checkpoint.save(path, *trained(way, STEPS), epoch=7)


def _load_from_torch(path: Path, settings: dict[str, Any]) -> None:
    engine = stepped_engine(settings, 1, seed=1)
    loaded = shardopt.checkpoint.load(path, engine)
    assert loaded.converted == {}
    whole, optimizer = trained("single", STEPS)
    assert_same(engine_snapshot(engine), snapshot_of(whole, optimizer))
    step_engine(engine, STEPS)
    step_whole(whole, optimizer, STEPS)
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))


@pytest.mark.parametrize(
    ("stage", "size", "way", "other_size"),
    [
        (1, 3, "fsdp", 2),
        (2, 2, "single", 1),
        (3, 2, "fsdp1 flat", 3),
        *slow([(2, 2, "fsdp columns", 3), (3, 3, "zero", 2)]),
    ],
)
def test_to_and_from_torch(
    ranks: Pool, deepspeed_ranks: Pool, tmp_path: Path, stage: int, size: int, way: str, other_size: int
) -> None:
    deepspeed_ranks.run(size, save_portable, tmp_path / "deepspeed", twins(_config(stage)))
    ranks.run(other_size, _load_in_torch, tmp_path / "deepspeed", way)
    ranks.run(other_size, _save_in_torch, tmp_path / "torch", way)
    deepspeed_ranks.run(size, _load_from_torch, tmp_path / "torch", _config(stage))


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(("stage", "zero"), [(2, ROUND_ROBIN), (3, {"stage3_param_persistence_threshold": 0})])
def test_frozen_parameters(tmp_path: Path, stage: int, zero: Zero) -> None:
    """From an engine to no engine, and back to another."""
    settings = config(stage, zero=zero)
    engine, other = (make_engine(make_frozen(seed), settings, model_parameters=None) for seed in (0, 1))
    engine.backward(loss_of(engine, make_batch(0)))
    engine.step()
    shardopt.checkpoint.save(tmp_path / "first", engine)
    whole = make_frozen(2)
    optimizer = shardopt.AdamW8bit([param for param in whole.parameters() if param.requires_grad], **HYPER)
    shardopt.checkpoint.load(tmp_path / "first", whole, optimizer)
    expected = {name: param.detach() for name, param in whole.named_parameters()}
    assert torch.equal(expected["embed.weight"], make_net().embed.weight)
    assert_same(model_parameters(engine), expected)
    shardopt.checkpoint.save(tmp_path / "second", whole, optimizer)
    shardopt.checkpoint.load(tmp_path / "second", other)
    assert_same(model_parameters(other), expected)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_bare_model_stands_for_its_engine(tmp_path: Path, stage: int) -> None:
    """Hugging Face's Trainer hands bare models to callbacks; the engine's own optimizer may be given."""
    engine, other = stepped_engine(_config(stage), STEPS), stepped_engine(_config(stage), 1, seed=1)
    shardopt.checkpoint.save(tmp_path, engine.module, engine.basic_optimizer if stage else None)
    shardopt.checkpoint.load(tmp_path, other.module, other.optimizer)
    goes_on_as_whole(other, twins(_config(stage)))


@pytest.mark.deepspeed_ranks(2)
def test_errors(tmp_path: Path) -> None:
    engine = stepped_engine(_config(2), STEPS)
    before = engine_snapshot(engine)
    other = shardopt.AdamW8bit(make_net().parameters())
    with pytest.raises(TypeError, match="got an optimizer beside a DeepSpeed engine that is not the engine's"):
        shardopt.checkpoint.save(tmp_path, engine, other)
    with pytest.raises(TypeError, match="got an optimizer beside a DeepSpeed engine that is not the engine's"):
        shardopt.checkpoint.load(tmp_path, engine, other)
    with pytest.raises(CheckpointError):
        shardopt.checkpoint.load(tmp_path / "none", engine)
    assert_same(engine_snapshot(engine), before)
    goes_on_as_whole(engine, twins(_config(2)), 1)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("zero", [{}, OFFLOAD])
def test_after_evaluation(tmp_path: Path, zero: Zero) -> None:
    """Weights that a forward pass without a step has gathered are not computed with again."""
    settings = config(3, zero={"stage3_param_persistence_threshold": 0, **zero})
    engines = [make_engine(make_net(seed=seed), settings) for seed in (0, 1)]
    for engine in engines:
        engine.backward(loss_of(engine, make_batch(0)))
        engine.step()
        engine.eval()
        with torch.no_grad():
            loss_of(engine, make_batch(1))
    shardopt.checkpoint.save(tmp_path, engines[0])
    shardopt.checkpoint.load(tmp_path, engines[1])
    with torch.no_grad():
        expected, got = (loss_of(engine, make_batch(2)) for engine in engines)
    assert torch.equal(got, expected)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_async_save(tmp_path: Path, stage: int) -> None:
    """The copy is what was saved, whatever the next steps do."""
    engine = stepped_engine(_config(stage), STEPS)
    saving = shardopt.checkpoint.async_save(tmp_path, engine, epoch=7)
    step_engine(engine, STEPS)
    saving.result()
    dist.barrier()
    load_portable(tmp_path, twins(_config(stage)))


def _other_codec(path: Path, settings: dict[str, Any]) -> None:
    """Converting codes the moments again, cut blocks included."""
    engine = stepped_engine(settings, 0)
    with pytest.raises(CheckpointError, match="convert=True"):
        shardopt.checkpoint.load(path, engine)
    loaded = shardopt.checkpoint.load(path, engine, convert=True)
    assert loaded.converted
    whole, optimizer = make_whole(settings)
    shardopt.checkpoint.load(path, whole, optimizer, convert=True)
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))


@pytest.mark.parametrize("stage", [2, 3])
def test_other_codec(deepspeed_ranks: Pool, tmp_path: Path, stage: int) -> None:
    params = {"codec": "companded8", "block_size": 64}
    deepspeed_ranks.run(2, save_portable, tmp_path, twins(_config(1)))
    deepspeed_ranks.run(3, _other_codec, tmp_path, config(stage, zero=WORST[stage], params=params))
