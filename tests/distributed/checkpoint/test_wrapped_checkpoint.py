"""Portable checkpoints of quantize_state: saved under any sharding and number of ranks, loaded under any other."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import shardopt
from ranks.models import WAYS, make_net, named_parameters
from ranks.pool import Pool
from ranks.runs import snapshot_of, step_with
from ranks.snapshot import Snapshot, assert_same, in_full
from shardopt import quantize_state
from shardopt.checkpoint import CheckpointError
from wrapped import ELEMENTWISE, Counting

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
    "fsdp1": (3, 2),
    "fsdp1 flat": (4, 3),
    "fsdp1 hybrid": (4, 4),
    "fsdp1 none flat": (2, 2),
    "zero": (2, 3),
}
MAKES: dict[str, Any] = {**ELEMENTWISE, "counting": Counting}


def _make(way: str, model: nn.Module, name: str, **options: Any) -> Any:
    options = {"min_quantized_numel": 64, "working_memory": 32 * 20000, **options}

    def wrapped(params: Any, **hyper: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return quantize_state(MAKES[name](list(params)), **options)

    if way == "zero":
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=wrapped, lr=1e-3)  # type: ignore[arg-type]
    return wrapped(model.parameters())


def _trained(way: str, name: str, seed: int = 0, steps: int = STEPS, **options: Any) -> tuple[nn.Module, Any]:
    model = WAYS[way](make_net(seed=seed))
    optimizer = _make(way, model, name, **options)
    for step in range(steps):
        step_with(model, optimizer, step + 100 * seed)
    return model, optimizer


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]


def _save(way: str, path: Path, name: str, options: dict[str, Any]) -> None:
    shardopt.checkpoint.save(path, *_trained(way, name, **options), epoch=7)


def _load(way: str, path: Path, name: str, options: dict[str, Any]) -> None:
    """Loads over other weights and state, compares with an unsharded run that was never saved, and goes on."""
    model, optimizer = _trained(way, name, seed=1, **options)
    step_with(model, optimizer, 99)
    loaded = shardopt.checkpoint.load(path, model, optimizer)
    assert loaded == ({"epoch": 7}, {})
    for step in (STEPS, STEPS + 1):
        expected, groups = _single(name, step, tuple(options.items()))
        assert_same(snapshot_of(model, optimizer), expected)
        assert repr(_groups(optimizer)) == groups
        step_with(model, optimizer, step)
    expected, _ = _single(name, STEPS + 2, tuple(options.items()))
    assert_same(snapshot_of(model, optimizer), expected)
    names = [key for key in expected if key.endswith("_codes")]
    assert len(names) > 3


@lru_cache(maxsize=32)
def _single(name: str, steps: int, options: tuple[tuple[str, Any], ...]) -> tuple[Snapshot, str]:
    """An unsharded run's snapshot, and its groups; each is made once per process."""
    model, optimizer = _trained("single", name, steps=steps, **dict(options))
    return snapshot_of(model, optimizer), repr(_groups(optimizer))


@pytest.fixture(scope="module")
def saved(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every layout."""
    folder = tmp_path_factory.mktemp("saved")
    paths = {way: folder / way.replace(" ", "-") for way in LAYOUTS}
    for way, (world_size, _) in LAYOUTS.items():
        ranks.run(world_size, _save, way, paths[way], "torch NAdam", {})
    return paths


@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize("sources", [1, pytest.param(len(LAYOUTS), marks=pytest.mark.slow)])
def test_any_to_any(ranks: Pool, saved: dict[str, Path], way: str, sources: int) -> None:
    """By default each layout loads what the one before it saved, the first of them what the last one did."""
    world_size, place = LAYOUTS[way][1], list(LAYOUTS).index(way)
    for before in range(1, sources + 1):
        ranks.run(world_size, _load, way, list(saved.values())[place - before], "torch NAdam", {})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("torch AdamW amsgrad", {"codec": "companded8", "block_size": 32}),
        ("torch Adagrad", {"codec": "dynamic8"}),
        ("torch RMSprop centered momentum", {}),
        ("counting", {}),
    ],
)
def test_optimizers_and_codecs(ranks: Pool, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    flat = "fsdp1" if name == "counting" else "fsdp1 flat"  # optimizers that are untested do not step flat tensors
    ranks.run(3, _save, flat, tmp_path / "flat", name, options)
    ranks.run(2, _load, "fsdp columns", tmp_path / "flat", name, options)
    ranks.run(3, _save, "fsdp columns", tmp_path / "columns", name, options)
    ranks.run(2, _load, flat, tmp_path / "columns", name, options)


def _to_the_bare_optimizer(path: Path) -> None:
    model = WAYS["fsdp"](make_net(seed=1))
    optimizer = _make("fsdp", model, "torch NAdam")
    shardopt.checkpoint.load(path, model, optimizer)
    bare = ELEMENTWISE["torch NAdam"](list(model.parameters()))
    bare.load_state_dict(optimizer.state_dict(dequantize=True))
    whole, expected = _trained("single", "torch NAdam")
    floats = expected.state_dict(dequantize=True)["state"]
    for index, param in enumerate(model.parameters()):
        assert bare.state[param].keys() == floats[index].keys()
        for key, value in floats[index].items():
            assert torch.equal(in_full(bare.state[param][key]), value)
    params = dict(whole.named_parameters())
    assert all(torch.equal(in_full(param), params[name]) for name, param in named_parameters(model).items())


def test_back_to_the_bare_optimizer(ranks: Pool, saved: dict[str, Path]) -> None:
    ranks.run(2, _to_the_bare_optimizer, saved["fsdp1"])


MISMATCHES: list[tuple[str, dict[str, Any], str]] = [
    ("torch AdamW foreach", {}, "quantize_state of torch.NAdam, expected that of quantize_state of torch.AdamW; load"),
    ("torch NAdam", {"codec": "dynamic8"}, "log8 in blocks of 128 state for dynamic8 in blocks of 128"),
    ("torch NAdam", {"block_size": 64}, "log8 in blocks of 128 state for log8 in blocks of 64"),
    ("torch NAdam", {"min_quantized_numel": 65}, "min_quantized_numel=64, expected 65; pass quantize_state"),
    ("torch NAdam", {"unsigned": ("exp_avg",)}, "exp_avg saved as signed, expected unsigned; pass quantize_state"),
]


def _refused(way: str, path: Path, name: str, options: dict[str, Any], message: str) -> None:
    model, optimizer = _trained(way, name, seed=1, steps=0 if "unsigned" in options else STEPS, **options)
    before, groups = snapshot_of(model, optimizer), repr(_groups(optimizer))
    with pytest.raises(CheckpointError, match=message):
        shardopt.checkpoint.load(path, model, optimizer)
    assert_same(snapshot_of(model, optimizer), before)
    assert repr(_groups(optimizer)) == groups


@pytest.mark.parametrize(("name", "options", "message"), MISMATCHES)
def test_mismatches(ranks: Pool, saved: dict[str, Path], name: str, options: dict[str, Any], message: str) -> None:
    ranks.run(2, _refused, "fsdp1", saved["fsdp"], name, options, message)


def _converted(way: str, path: Path) -> None:
    """Codes are those of the saved moments, decoded and encoded in the new blocks, as unsharded."""
    options = {"codec": "dynamic8", "block_size": 64}
    results = []
    for each in (way, "single"):
        model, optimizer = _trained(each, "torch NAdam", seed=1, **options)
        converted = shardopt.checkpoint.load(path, model, optimizer, convert=True).converted
        assert set(converted.values()) == {"log8 in blocks of 128 state for dynamic8 in blocks of 64"}
        results.append(snapshot_of(model, optimizer))
    assert_same(*results)
    saved = snapshot_of(*_trained("single", "torch NAdam"))
    kept = [key for key in saved if not key.endswith(("_codes", "_scales"))]
    assert_same({key: results[0][key] for key in kept}, {key: saved[key] for key in kept})


@pytest.mark.parametrize("way", ["fsdp columns", "fsdp1"])
def test_conversion(ranks: Pool, saved: dict[str, Path], way: str) -> None:
    ranks.run(2, _converted, way, saved["tp"])


def _without_memory(path: Path) -> None:
    """One rank fails while state is made: nothing is changed on any."""
    from shardopt.checkpoint.quantized_owner import QuantizedOwner

    model, optimizer = _trained("fsdp1", "torch NAdam", seed=1)
    before = snapshot_of(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(QuantizedOwner, "placed", _out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            shardopt.checkpoint.load(path, model, optimizer)
    assert_same(snapshot_of(model, optimizer), before)


def _out_of_memory(*args: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_no_memory_changes_nothing(ranks: Pool, saved: dict[str, Path]) -> None:
    ranks.run(2, _without_memory, saved["hsdp"])
