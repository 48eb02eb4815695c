"""The portable checkpoint: saved under any sharding and number of ranks, loaded under any other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardopt
from attack.index_file import read_index, strict_tensors
from ranks.models import WAYS, make_net
from ranks.pool import Pool
from ranks.runs import make_optimizer, single, snapshot_of, step_with, trained
from ranks.snapshot import assert_same
from shardopt.checkpoint.portable import Stager
from shardopt.checkpoint.restore import Restoration

STEPS = 2

#: Every layout, with the number of ranks it is saved on and another that it is loaded on, where it exists on several.
LAYOUTS = {
    "single": (1, 1),
    "ddp": (3, 2),
    "fsdp": (3, 4),
    "fsdp columns": (2, 3),
    "hsdp": (4, 4),
    "tp": (2, 3),
    "fsdp tp": (4, 4),
    "fsdp columns tp": (4, 4),
    "fsdp1": (3, 2),
    "fsdp1 flat": (4, 3),
    "fsdp1 hybrid": (4, 4),
    "zero": (2, 3),
}


def _save(way: str, path: Path, rule: str = "adamw") -> None:
    model, optimizer = trained(way, STEPS, rule)
    shardopt.checkpoint.save(path, model, optimizer, epoch=7, generator=torch.arange(5))


def _fresh(way: str, codec: str = "log8", **options: Any) -> tuple[nn.Module, Any]:
    """Another model than the one that was saved, and its optimizer, which has taken a step already."""
    model = WAYS[way](make_net(seed=1))
    optimizer = make_optimizer(way, model, codec=codec, **options)
    step_with(model, optimizer, 99)
    return model, optimizer


def _load(way: str, path: Path) -> None:
    """Loads, compares with an unsharded run that was never saved, and goes on beside it."""
    model, optimizer = _fresh(way, eps=0.5)
    loaded = shardopt.checkpoint.load(path, model, optimizer)
    assert loaded.extra["epoch"] == 7
    assert torch.equal(loaded.extra["generator"], torch.arange(5))
    assert loaded.converted == {}
    assert loaded.hyper_parameters == {0: {"eps": (0.5, 1e-8)}}
    assert_same(snapshot_of(model, optimizer), single(STEPS))
    step_with(model, optimizer, STEPS)
    assert_same(snapshot_of(model, optimizer), single(STEPS + 1))


@pytest.fixture(scope="module")
def saved(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every layout."""
    folder = tmp_path_factory.mktemp("saved")
    paths = {way: folder / way.replace(" ", "-") for way in LAYOUTS}
    for way, (world_size, _) in LAYOUTS.items():
        ranks.run(world_size, _save, way, paths[way])
    return paths


@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize("sources", [1, pytest.param(len(LAYOUTS), marks=pytest.mark.slow)])
def test_any_to_any(ranks: Pool, saved: dict[str, Path], way: str, sources: int) -> None:
    """By default each layout loads what the one before it saved, the first of them what the last one did."""
    world_size, place = LAYOUTS[way][1], list(LAYOUTS).index(way)
    for before in range(1, sources + 1):
        ranks.run(world_size, _load, way, list(saved.values())[place - before])


@pytest.mark.parametrize("way", LAYOUTS)
def test_the_format_is_as_described(saved: dict[str, Path], way: str) -> None:
    """A reader that knows only the description finds each element once, in the file where the rules have it.

    Parts follow from a rule: a list of them would grow with the number of ranks.
    """
    assert not any("parts" in line for line in read_index(saved[way])["tensors"].values())
    found, whole = (strict_tensors(saved[each], read_index(saved[each])) for each in (way, "single"))
    assert isinstance(found, dict), found
    assert found == whole


def _load_momentum(way: str, path: Path) -> None:
    """Into an optimizer that has no moments until it is given the checkpoint's momentum."""
    model = WAYS[way](make_net(seed=1))
    optimizer = make_optimizer(way, model, "sgd")
    shardopt.checkpoint.load(path, model, optimizer)
    step_with(model, optimizer, STEPS)
    assert_same(snapshot_of(model, optimizer), single(STEPS + 1, "momentum"))


def test_momentum_comes_with_the_checkpoint(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(1, _save, "single", tmp_path, "momentum")
    ranks.run(2, _load_momentum, "fsdp1 flat", tmp_path)


def _save_while_training(way: str, path: Path) -> None:
    model, optimizer = trained(way, STEPS)
    for _ in range(2):  # the second replaces the first
        saving = shardopt.checkpoint.async_save(path, model, optimizer, epoch=7, generator=torch.arange(5))
        other, beside = _fresh(way)
        for step in range(5):
            step_with(other, beside, step)
        saving.result(timeout=60)


def test_async_save(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, _save_while_training, "fsdp1 flat", tmp_path)
    ranks.run(3, _load, "fsdp columns", tmp_path)


def _save_without_memory(path: Path) -> tuple[str, str]:
    """The host of rank 1 has no memory for the copy; then it has."""
    model, optimizer = trained("fsdp", STEPS)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Stager, "stage", _no_memory)
        try:
            shardopt.checkpoint.async_save(path, model, optimizer)
        except RuntimeError as error:
            failed = type(error).__name__, str(error)
    shardopt.checkpoint.async_save(path, model, optimizer, epoch=7, generator=torch.arange(5)).result(timeout=60)
    return failed


def _no_memory(stager: Stager, tensors: Any) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_async_save_without_memory_fails_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    told, own = ranks.run(2, _save_without_memory, tmp_path)
    assert own == ("RuntimeError", "DefaultCPUAllocator: can't allocate memory")
    assert told[0] == "CheckpointError"
    assert "got an error on rank 1" in told[1]
    assert "can't allocate memory" in told[1]
    ranks.run(3, _load, "fsdp columns", tmp_path)


def _load_without_memory(way: str, path: Path, convert: bool) -> tuple[str, str]:
    """The device of rank 1 has none for the state; then it has."""
    model, optimizer = _fresh(way, "dynamic8" if convert else "log8")
    before = snapshot_of(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Restoration, "_state_on_device", _out_of_memory)
        try:
            shardopt.checkpoint.load(path, model, optimizer, convert=convert)
        except RuntimeError as error:
            failed = type(error).__name__, str(error)
    assert_same(snapshot_of(model, optimizer), before)
    shardopt.checkpoint.load(path, model, optimizer, convert=convert)
    return failed


def _out_of_memory(*args: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(("way", "convert"), [("fsdp1 flat", True), ("zero", False)])
def test_no_memory_for_the_state_changes_nothing(ranks: Pool, tmp_path: Path, way: str, convert: bool) -> None:
    ranks.run(2, _save, "fsdp", tmp_path)
    told, own = ranks.run(2, _load_without_memory, way, tmp_path, convert)
    assert own == ("OutOfMemoryError", "CUDA out of memory")
    assert told[0] == "CheckpointError"
    assert "got an error on rank 1" in told[1]
