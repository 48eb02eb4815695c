"""Checkpoints of DeepSpeed engines: its own on as many ranks, and the portable one from and to any layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardopt
from ranks.deepspeed import (
    BF16,
    BF16_OPTIMIZER,
    HYPER,
    OFFLOAD,
    ROUND_ROBIN,
    STEPS,
    SUB_GROUPS,
    WORST,
    assert_as_whole,
    config,
    engine_snapshot,
    goes_on_as_whole,
    load_own,
    load_portable,
    make_engine,
    make_whole,
    model_parameters,
    save_own,
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
from shardopt.sharding.deepspeed.engine import opened

Zero = dict[str, Any]


def _config(stage: int) -> dict[str, Any]:
    return config(stage, zero=WORST[stage])


@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("stage", "zero", "sections"),
    [
        *((stage, zero, {}) for stage, zero in WORST.items()),
        (3, {}, {}),
        (2, OFFLOAD, {}),
        (3, {**OFFLOAD, **SUB_GROUPS}, {}),
        (1, {}, BF16_OPTIMIZER),
        (0, {}, BF16),
        (2, ROUND_ROBIN, BF16),
        (3, SUB_GROUPS, BF16),
    ],
)
def test_own_checkpoint(
    deepspeed_ranks: Pool, tmp_path: Path, stage: int, zero: Zero, sections: dict[str, Any], steps: int
) -> None:
    of = twins(config(stage, zero=zero, **sections), grouped=True)
    deepspeed_ranks.run(2, save_own, tmp_path, of)
    deepspeed_ranks.run(2, load_own, tmp_path, of, steps)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((1, 2), (2, 3)),
        ((2, 3), (3, 2)),
        ((3, 2), (1, 3)),
        ((3, 3), (3, 2)),
        ((2, 2), (0, 2)),
        ((0, 3), (2, 2)),
        ((2, 2), (2, 1)),
        ((2, 2), (2, 3)),
        ((3, 2), (3, 1)),
        ((3, 2), (3, 3)),
        *(
            pytest.param((a, m), (b, n), marks=pytest.mark.slow)
            for a in (1, 2, 3)
            for b in (1, 2, 3)
            for m in (1, 2, 3, 4)
            for n in (1, 2, 3, 4)
        ),
    ],
)
def test_between_stages(deepspeed_ranks: Pool, tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]) -> None:
    """Between pairs of a stage and a number of ranks."""
    for (stage, size), work in ((saved, save_portable), (loaded, load_portable)):
        deepspeed_ranks.run(size, work, tmp_path, twins(_config(stage), grouped=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_into_an_engine_without_state(deepspeed_ranks: Pool, tmp_path: Path, stage: int) -> None:
    deepspeed_ranks.run(2, save_portable, tmp_path, twins(_config(stage)))
    deepspeed_ranks.run(3, load_portable, tmp_path, twins(_config(stage)), 0)


@pytest.mark.parametrize("stage", [2, 3])
def test_with_offload(deepspeed_ranks: Pool, tmp_path: Path, stage: int) -> None:
    offloaded = twins(config(stage, zero={**WORST[stage], **OFFLOAD}))
    deepspeed_ranks.run(2, save_portable, tmp_path / "offloaded", offloaded)
    deepspeed_ranks.run(3, load_portable, tmp_path / "offloaded", twins(_config(1)))
    deepspeed_ranks.run(3, save_portable, tmp_path / "not", twins(_config(stage)))
    deepspeed_ranks.run(2, load_portable, tmp_path / "not", offloaded)


@pytest.mark.parametrize(
    ("stage", "other"),
    [(1, 2), (3, 1), (0, 2), *(pytest.param(*stages, marks=pytest.mark.slow) for stages in [(2, 3), (3, 0), (0, 0)])],
)
def test_bf16(deepspeed_ranks: Pool, tmp_path: Path, stage: int, other: int) -> None:
    """Masters are saved in the place of the model's weights: float32."""
    saved, loaded = (twins(config(n, zero=WORST[n], **BF16)) for n in (stage, other))
    deepspeed_ranks.run(2, save_portable, tmp_path, saved)
    deepspeed_ranks.run(4 if other == 2 else 2, load_portable, tmp_path, loaded)


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
        (2, 2, "fsdp columns", 3),
        (3, 2, "fsdp1 flat", 3),
        (3, 3, "zero", 2),
        (1, 2, "tp", 2),
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
@pytest.mark.parametrize(
    ("stage", "zero"), [(1, {}), (2, ROUND_ROBIN), (3, {}), (3, {"stage3_param_persistence_threshold": 0})]
)
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
def test_the_engines_own_optimizer_may_be_given(tmp_path: Path) -> None:
    engine = stepped_engine(_config(2), STEPS)
    shardopt.checkpoint.save(tmp_path, engine, engine.optimizer)
    step_engine(engine, STEPS)
    shardopt.checkpoint.load(tmp_path, engine, engine.basic_optimizer)
    assert_as_whole(engine, *stepped_whole(_config(2), STEPS))


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_bare_model_stands_for_its_engine(tmp_path: Path, stage: int) -> None:
    """Hugging Face's Trainer hands bare models to callbacks."""
    engine, other = stepped_engine(_config(stage), STEPS), stepped_engine(_config(stage), 1, seed=1)
    shardopt.checkpoint.save(tmp_path, engine.module)
    shardopt.checkpoint.load(tmp_path, other.module, other.optimizer)
    goes_on_as_whole(other, twins(_config(stage)))


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("stage", "zero", "sections"), [(1, {}, BF16_OPTIMIZER), (2, ROUND_ROBIN, BF16), (2, OFFLOAD, {}), (3, {}, {})]
)
def test_state_of_single_parameters_is_refused(stage: int, zero: Zero, sections: dict[str, Any]) -> None:
    """On all ranks, whether they hold elements of the parameter or not; masters are given out."""
    settings = config(stage, zero=zero, **sections)
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
        safe_set_full_optimizer_state,
    )

    engine = stepped_engine(settings, STEPS)
    whole, _ = stepped_whole(settings, STEPS)
    for name, param in engine.module.named_parameters():
        with pytest.raises(RuntimeError, match=r"'exp_avg' of one parameter.*; use .*shardopt\.checkpoint\.save"):
            safe_get_full_optimizer_state(param, "exp_avg")
        with pytest.raises(RuntimeError, match=r"'exp_avg' of one parameter"):
            safe_set_full_optimizer_state(param, torch.zeros(engine.bare_shapes[name]), "exp_avg")
        if zero != ROUND_ROBIN:  # whose offsets DeepSpeed does not know
            assert torch.equal(safe_get_full_fp32_param(param), whole.get_parameter(name))


@pytest.mark.deepspeed_ranks(1)
def test_universal_checkpoints_are_refused() -> None:
    with pytest.raises(ValueError, match=r"load_universal: got true.*use shardopt\.checkpoint\.save"):
        stepped_engine({**_config(2), "checkpoint": {"load_universal": True}}, 0)


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


class DeepSpeedEngine(SimpleNamespace):
    """A stand-in, recognized by its name."""


@pytest.mark.parametrize(
    "parallel",
    [{"pipeline_parallelism": True}, {"autotp_size": lambda: 2}, {"mp_world_size": 2}],
    ids=["pipeline", "autotp", "model parallel"],
)
def test_model_parallel_is_refused(parallel: dict[str, Any]) -> None:
    """Ranks have other parameters under the same names."""
    alone = {"pipeline_parallelism": False, "autotp_size": lambda: 0, "mp_world_size": 1}
    engine = DeepSpeedEngine(optimizer=None, module=nn.Linear(1, 1), **{**alone, **parallel})
    with pytest.raises(ValueError, match="got a DeepSpeed engine with tensor or pipeline"), opened(engine):
        pass


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
