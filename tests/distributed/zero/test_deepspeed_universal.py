"""DeepSpeed's universal checkpoints: made of ours by DeepSpeed's own tool, and loaded, whoever's they are."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks.deepspeed import (
    BF16,
    BF16_OPTIMIZER,
    OFFLOAD,
    ROUND_ROBIN,
    STEPS,
    SUB_GROUPS,
    WITHOUT_MASTERS,
    WORST,
    assert_as_whole,
    config,
    engine_snapshot,
    make_whole,
    masters,
    step_engine,
    step_whole,
    stepped_engine,
    stepped_whole,
    whole_snapshot,
)
from ranks.pool import Pool
from ranks.snapshot import assert_same
from shardopt.sharding.deepspeed.moment_view import MomentView, SavedBuffer

FLOATS = ("exp_avg", "exp_avg_sq")


def _universal(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "checkpoint": {"load_universal": True}}


def _convert(folder: Path) -> None:
    """DeepSpeed's own tool, in this process."""
    from deepspeed.checkpoint.ds_to_universal import main

    tag = (folder / "latest").read_text().strip()
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(folder / tag), "output_folder": str(folder / f"{tag}_universal")}
    main(Namespace(**folders, **options, inject_missing_state=True))


def _save(path: Path, settings: dict[str, Any], grouped: bool = False, convert: bool = True) -> None:
    engine = stepped_engine(settings, STEPS, grouped=grouped)
    engine.save_checkpoint(str(path))
    dist.barrier()
    if convert and dist.get_rank() == 0:
        _convert(path)
    dist.barrier()


def _load(
    path: Path, settings: dict[str, Any], saved: dict[str, Any] | None = None, steps: int = 2, grouped: bool = False
) -> None:
    """Loads into an engine of other weights that has taken some steps, and goes on.

    Args:
        path: the folder of the checkpoint.
        settings: the config.
        saved: the config with which the checkpoint was saved, where its state is quantized in another way.
        steps: before loading.
        grouped: whether there are several param groups.
    """
    engine = stepped_engine(_universal(settings), steps, seed=1, grouped=grouped)
    tag, _ = engine.load_checkpoint(str(path))
    assert tag is not None
    # The moments of the unsharded run are decoded, and quantized as the engine's.
    decoded, optimizer_before = stepped_whole(saved or settings, STEPS, grouped=grouped)
    whole, optimizer = make_whole(settings, grouped=grouped)
    whole.load_state_dict(decoded.state_dict())
    optimizer.load_state_dict(optimizer_before.state_dict(dequantize=True))
    for step in range(STEPS, STEPS + 3):
        assert_as_whole(engine, whole, optimizer)
        step_engine(engine, step)
        step_whole(whole, optimizer, step)


@pytest.mark.parametrize(
    ("saved", "loaded", "zero", "other", "steps"),
    [
        ((1, 2), (2, 3), {}, {}, 2),
        ((2, 4), (1, 2), ROUND_ROBIN, BF16, 2),
        ((3, 2), (3, 4), SUB_GROUPS, BF16, 2),
        ((3, 3), (3, 2), {}, {}, 0),
        ((1, 2), (1, 4), {}, BF16_OPTIMIZER, 2),
        pytest.param((2, 2), (2, 4), {**OFFLOAD, **ROUND_ROBIN}, {}, 2, marks=pytest.mark.slow),
        pytest.param((3, 4), (3, 2), {**OFFLOAD, **SUB_GROUPS}, BF16, 2, marks=pytest.mark.slow),
        pytest.param((1, 1), (2, 4), ROUND_ROBIN, BF16, 0, marks=pytest.mark.slow),
        pytest.param((2, 4), (1, 1), {}, {}, 0, marks=pytest.mark.slow),
        pytest.param((3, 1), (3, 4), {}, BF16, 0, marks=pytest.mark.slow),
        pytest.param((3, 4), (3, 1), SUB_GROUPS, {}, 2, marks=pytest.mark.slow),
        pytest.param((2, 2), (2, 2), {}, BF16_OPTIMIZER, 0, marks=pytest.mark.slow),
    ],
)
def test_between_sizes(
    deepspeed_ranks: Pool,
    tmp_path: Path,
    saved: tuple[int, int],
    loaded: tuple[int, int],
    zero: dict[str, Any],
    other: dict[str, Any],
    steps: int,
) -> None:
    (stage, size), (other_stage, other_size) = saved, loaded
    deepspeed_ranks.run(size, _save, tmp_path, config(stage, zero=zero, **other), True)
    deepspeed_ranks.run(other_size, _load, tmp_path, config(other_stage, zero=zero, **other), None, steps, True)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_tool_by_itself(deepspeed_ranks: Pool, tmp_path: Path, stage: int) -> None:
    deepspeed_ranks.run(2, _save, tmp_path, config(stage, zero=WORST[stage]), False, False)
    tag = (tmp_path / "latest").read_text().strip()
    tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(tmp_path / tag), "--output_folder", str(tmp_path / "universal")]
    subprocess.run([*tool, *folders], check=True, cwd=tmp_path, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    deepspeed_ranks.run(3, _load, tmp_path, config(stage, zero=WORST[stage]))


@pytest.mark.parametrize("stage", [2, 3])
def test_other_codec(deepspeed_ranks: Pool, tmp_path: Path, stage: int) -> None:
    """The checkpoint is float32, so the engine that loads it may store state by any codec."""
    options = {"codec": "companded8", "block_size": 64}
    deepspeed_ranks.run(2, _save, tmp_path, config(stage))
    deepspeed_ranks.run(3, _load, tmp_path, config(stage, params=options), config(stage), 0)


def _save_of_torch(path: Path, settings: dict[str, Any]) -> None:
    """A checkpoint of torch.optim's optimizer, with what DeepSpeed says that it holds beside it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    params = {"lr": 2e-2, "weight_decay": 0.2, "torch_adam": True}
    engine = stepped_engine({**settings, "optimizer": {"type": "AdamW", "params": params}}, STEPS)
    assert type(engine.basic_optimizer) is torch.optim.AdamW
    named = list(engine.module.named_parameters())
    weights = {name: safe_get_full_fp32_param(param) for name, param in named}
    state = [{key: safe_get_full_optimizer_state(param, key) for key in FLOATS} for _, param in named]
    if dist.get_rank() == 0:
        torch.save((weights, state), path / "held.pt")
    engine.save_checkpoint(str(path))
    dist.barrier()
    if dist.get_rank() == 0:
        _convert(path)
    dist.barrier()


def _load_of_torch(path: Path, settings: dict[str, Any]) -> None:
    engine = stepped_engine(_universal(settings), 1, seed=1)
    engine.load_checkpoint(str(path))
    whole, optimizer = make_whole(config(1, params={"lr": 2e-2, "weight_decay": 0.2}))
    weights, state = torch.load(path / "held.pt")
    whole.load_state_dict(weights)
    groups = torch.optim.AdamW(whole.parameters(), lr=2e-2, weight_decay=0.2).state_dict()["param_groups"]
    state = {index: {"step": torch.tensor(float(STEPS)), **entries} for index, entries in enumerate(state)}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))
    step_engine(engine, STEPS)
    step_whole(whole, optimizer, STEPS)
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))


@pytest.mark.parametrize("stage", [1, 3])
def test_from_torch_optim(deepspeed_ranks: Pool, tmp_path: Path, stage: int) -> None:
    deepspeed_ranks.run(2, _save_of_torch, tmp_path, config(stage, None))
    deepspeed_ranks.run(3, _load_of_torch, tmp_path, config(stage))


def _float32_memory() -> Iterator[int]:
    """Where float32 tensors stand."""
    gc.collect()
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and not isinstance(thing, MomentView) and thing.dtype == torch.float32:
            yield thing.untyped_storage().data_ptr()


def _leaves_no_float32(path: Path, settings: dict[str, Any], steps: int) -> None:
    engine = stepped_engine(_universal(settings), steps, seed=1)
    before = set(_float32_memory())
    engine.load_checkpoint(str(path))
    state = [entry for flat, _ in masters(engine) for entry in engine.basic_optimizer.state[flat].values()]
    assert sum(entry.numel() for entry in state if entry.dtype == torch.uint8) > 0
    left = set(_float32_memory()) - before - {entry.untyped_storage().data_ptr() for entry in state}
    assert not left, f"got {len(left)} pieces of float32 memory that the loading made, expected none but the state"
    flats = {flat.shape for flat, _ in masters(engine)}
    assert all(entry.shape not in flats for entry in state if entry.dtype == torch.float32)


@pytest.mark.parametrize("stage", [2, 3])
def test_no_float32_is_left(deepspeed_ranks: Pool, tmp_path: Path, stage: int) -> None:
    deepspeed_ranks.run(2, _save, tmp_path, config(stage, zero=WORST[stage], **BF16))
    for steps in (0, 2):
        deepspeed_ranks.run(3, _leaves_no_float32, tmp_path, config(stage, zero=WORST[stage], **BF16), steps)


def _is_not_decoded(self: SavedBuffer) -> dict[str, Tensor]:
    raise AssertionError("got a look into the moments, expected none")


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engines_own_checkpoint_stays_coded(tmp_path: Path, stage: int) -> None:
    """An engine's own checkpoint has no float32 moments, on disk or when it or its weights are loaded."""
    settings = config(stage)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine = stepped_engine(settings, STEPS)
    engine.save_checkpoint(str(tmp_path))
    dist.barrier()
    file = next(tmp_path.glob(f"*/*zero_pp_rank_{dist.get_rank()}_mp_rank_00_optim_states.pt"))
    with zipfile.ZipFile(file) as archive:
        stored = sum(info.file_size for info in archive.infolist() if re.search(r"/data/\d+$", info.filename))
    state = [entry for flat, _ in masters(engine) for entry in engine.basic_optimizer.state[flat].values()]
    held = sum(entry.nbytes for entry in [*state, *(flat for flat, _ in masters(engine))])
    assert stored <= held + 100
    before = engine_snapshot(engine)
    decoded, SavedBuffer.decoded = SavedBuffer.decoded, property(_is_not_decoded)  # type: ignore[assignment, method-assign]
    try:
        other = stepped_engine(settings, 1, seed=1)
        other.load_checkpoint(str(tmp_path))
        weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    finally:
        SavedBuffer.decoded = decoded  # type: ignore[method-assign]
    assert_same(engine_snapshot(other), before)
    assert_same(weights, {name: before[name] for name in weights})
    assert weights.keys() == engine.bare_shapes.keys()


def _is_refused(path: Path, settings: dict[str, Any], match: str, grouped: bool = False) -> None:
    engine = stepped_engine(_universal(settings), 1, seed=1, grouped=grouped)
    before = engine_snapshot(engine)
    with pytest.raises(ValueError, match=match):
        engine.load_checkpoint(str(path))
    assert_same(engine_snapshot(engine), before)
    step_engine(engine, 1)


@pytest.mark.parametrize(
    ("kind", "params", "other", "match"),
    [
        (
            "Lion8bit",
            {},
            {},
            "got Lion8bit with exp_avg for a universal checkpoint, expected .*exp_avg, exp_avg_sq; use",
        ),
        ("SGD8bit", {}, {}, "got SGD8bit with no moments"),
        (
            "AdamW8bit",
            {"master_weight_bits": 32},
            {"bf16": WITHOUT_MASTERS},
            "got master_weight_bits=32 .*no place",
        ),
    ],
)
def test_what_cannot_load(
    deepspeed_ranks: Pool, tmp_path: Path, kind: str, params: dict[str, Any], other: dict[str, Any], match: str
) -> None:
    deepspeed_ranks.run(2, _save, tmp_path, config(1))
    settings = config(1, kind, params={"weight_decay": 0.0, **params}, **other)
    deepspeed_ranks.run(2, _is_refused, tmp_path, settings, match)


@pytest.mark.parametrize("stage", [1, 3])
def test_other_groups(deepspeed_ranks: Pool, tmp_path: Path, stage: int) -> None:
    deepspeed_ranks.run(2, _save, tmp_path, config(stage))
    deepspeed_ranks.run(3, _is_refused, tmp_path, config(stage), "got 1 param groups, expected 2; give the", True)


@pytest.mark.deepspeed_ranks(1)
def test_nvme_is_refused() -> None:
    from shardopt.sharding.deepspeed.hooks import _check_config

    said = {"zero_optimization": True, "zero_elastic_checkpoint": False}
    said |= {"load_universal_checkpoint": True, "zero_nvme_offload_optimizer": True}
    engine = SimpleNamespace(
        **{name: partial(bool, value) for name, value in said.items()}, zenflow_config=lambda: None
    )
    with pytest.raises(ValueError, match=r"load_universal: got true with offload_optimizer\.device nvme"):
        _check_config(engine)


def _tool_refuses(path: Path, settings: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        _save(path, settings)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_the_tool_cannot_convert(deepspeed_ranks: Pool, tmp_path: Path, stage: int) -> None:
    deepspeed_ranks.run(
        1, _tool_refuses, tmp_path / "lion", config(stage, "Lion8bit"), KeyError, "exp_avg_sq, too.*Adam"
    )
    settings = config(stage, params={"master_weight_bits": 24}, bf16=WITHOUT_MASTERS)
    deepspeed_ranks.run(1, _tool_refuses, tmp_path / "bits", settings, RuntimeError, "8 bits are in the optimizer's")
