"""Portable checkpoints of quantize_state: saved under any sharding and number of ranks, loaded under any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import shardopt
from attack.index_file import read_saved
from attack.mutations import State
from ranks.models import WAYS, make_net
from ranks.pool import Pool
from ranks.runs import snapshot_of, step_with
from ranks.snapshot import assert_same
from shardopt import quantize_state
from shardopt.checkpoint import CheckpointError
from weight_formats import BF16, FP32
from wrapped import BY_PARAMETER, ELEMENTWISE, Counting, Custom, bits, of, parameters, quietly, same, trained

STEPS = 2

MAKES: dict[str, Any] = {**ELEMENTWISE, "counting": Counting}


def _trained(way: str, name: str, seed: int = 0, steps: int = STEPS, **options: Any) -> tuple[nn.Module, Any]:
    def make(params: Any, **hyper: Any) -> Any:
        return quietly(MAKES[name](list(params)), **{"min_quantized_numel": 64, "keep": ("z",), **options})

    model = WAYS[way](make_net(seed=seed))
    if way == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, lr=1e-3)  # type: ignore[arg-type]
    else:
        optimizer = make(model.parameters())
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
    whole, expected = _trained("single", name, **options)
    assert shardopt.checkpoint.load(path, model, optimizer)[:2] == ({"epoch": 7}, {})
    for step in (STEPS, STEPS + 1):
        assert_same(snapshot_of(model, optimizer), snapshot_of(whole, expected))
        assert repr(_groups(optimizer)) == repr(_groups(expected))
        for each in ((model, optimizer), (whole, expected)):
            step_with(*each, step)
    assert any(key.endswith("_codes") for key in snapshot_of(whole, expected))


@pytest.mark.parametrize(
    ("saved", "loaded", "name", "options"),
    [
        ((2, "zero"), (3, "fsdp"), "torch AdamW amsgrad", {"codec": "companded8", "block_size": 32}),
        ((3, "ddp"), (2, "zero"), "torch Adagrad", {"codec": "dynamic8"}),
        ((4, "hsdp"), (1, "single"), "counting", {}),
    ],
)
def test_any_to_any(
    ranks: Pool, tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str], name: str, options: dict[str, Any]
) -> None:
    ranks.run(saved[0], _save, saved[1], tmp_path, name, options)
    ranks.run(loaded[0], _load, loaded[1], tmp_path, name, options)


def _model(dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    return nn.ParameterList(parameters(dtype))


def _stepped(make: Any, model: nn.ParameterList, **options: Any) -> Any:
    return trained(quietly(make(list(model)), **options), list(model))


def _shown(optimizer: Any, param: torch.Tensor) -> str:
    """The state of a parameter: types, dtypes and all values."""
    items = sorted(optimizer.state[param].items())
    return repr([(key, x.dtype, x.tolist()) if isinstance(x, torch.Tensor) else (key, x) for key, x in items])


@pytest.mark.parametrize(
    "make", [Counting, Custom, BY_PARAMETER["torch Adafactor"], of("torch.optim", "AdamW", fused=True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_comes_back(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    model, other = _model(dtype), _model(dtype)
    optimizer, again = _stepped(make, model), quietly(make(list(other)))
    optimizer.param_groups[0]["tag"] = ("a", 1)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    trained(again, list(other), range(50, 52))
    shardopt.checkpoint.load(tmp_path, other, again)
    for _ in range(2):
        for param, old in zip(other, model, strict=True):
            assert torch.equal(param, old)
            assert _shown(again, param) == _shown(optimizer, old)
        assert repr(_groups(again)) == repr(_groups(optimizer))
        for each, params in ((optimizer, model), (again, other)):
            trained(each, list(params), range(4, 6))


def test_what_a_checkpoint_cannot_hold(tmp_path: Path) -> None:
    model = _model()
    optimizer = _stepped(Counting, model)
    state = optimizer.state[model[0]]
    for key, value in (("x", {"a": 1}), ("x", [1]), ("x", "text"), ("x", 2**63), ("a.b", 1), ("a:b", 1)):
        state[key] = value
        with pytest.raises(CheckpointError, match=rf"state entry '{key}'.*save optimizer.state_dict"):
            shardopt.checkpoint.save(tmp_path, model, optimizer)
        del state[key]
    optimizer.state["total"] = 3
    with pytest.raises(CheckpointError, match="state of 'total', which is no parameter"):
        shardopt.checkpoint.save(tmp_path, model, optimizer)
    assert not (tmp_path / "checkpoint.json").exists()


def test_a_tensor_as_learning_rate(tmp_path: Path) -> None:
    model = _model()
    optimizer = _stepped(lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.25), foreach=False), model)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    fresh = quantize_state(torch.optim.AdamW(list(model), lr=1.0))
    shardopt.checkpoint.load(tmp_path, model, fresh)
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["foreach"]) == (0.25, None)
    lr = optimizer.param_groups[0]["lr"]
    lr.fill_(3.0)
    shardopt.checkpoint.load(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.25


@pytest.mark.parametrize(("saved", "own"), [(FP32, FP32), (BF16, FP32), (FP32, BF16)])
def test_conversion(tmp_path: Path, saved: torch.dtype, own: torch.dtype) -> None:
    """Of weights and codecs: codes are those of the saved moments, decoded and encoded in the new blocks."""
    model, other = _model(saved), _model(own)
    optimizer = _stepped(torch.optim.NAdam, model)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    again = _stepped(torch.optim.NAdam, other, codec="dynamic8", block_size=64)
    with pytest.raises(CheckpointError, match="log8 in blocks of 128, this optimizer has dynamic8 in blocks of 64"):
        shardopt.checkpoint.load(tmp_path, other, again)
    shardopt.checkpoint.load(tmp_path, other, again, convert=True)
    expected = quietly(torch.optim.NAdam(_model(own)), codec="dynamic8", block_size=64)
    expected.load_state_dict(optimizer.state_dict(dequantize=True))
    if saved == own:
        assert same(bits([], again), bits([], expected))
    for param, old in zip(other, model, strict=True):
        assert torch.equal(param, old.to(own))
        for key, value in optimizer.state[old].items():
            if not key.endswith(("_codes", "_scales")):
                assert same([again.state[param][key]], [value if value.dim() == 0 else value.to(own)])
    trained(again, list(other), range(1))


ADAMW = "quantize_state of torch.AdamW"
MISMATCHES: list[tuple[Any, Any, str]] = [
    (torch.optim.NAdam, {}, f"{ADAMW}, expected that of quantize_state of torch.NAdam; load it into"),
    (torch.optim.AdamW, {"min_quantized_numel": 65}, "min_quantized_numel=4096, expected 65; pass quantize_state"),
    (
        torch.optim.AdamW,
        {"unsigned": ("exp_avg",)},
        r"unsigned=\['exp_avg_sq'\], expected \['exp_avg', 'exp_avg_sq'\]; pass",
    ),
    (shardopt.AdamW8bit, None, f"got the state of {ADAMW}, expected that of AdamW8bit; load it into"),
]


@pytest.mark.parametrize(("make", "options", "message"), MISMATCHES)
def test_mismatches(tmp_path: Path, make: Any, options: dict[str, Any] | None, message: str) -> None:
    """Nothing is loaded. The other way, too: a wrapped optimizer takes no state of shardopt's own."""
    model, other = _model(), _model()
    shardopt.checkpoint.save(tmp_path / "wrapped", model, _stepped(torch.optim.AdamW, model))
    shardopt.checkpoint.save(tmp_path / "own", other, trained(shardopt.AdamW8bit(list(other)), list(other)))
    again = make(list(model)) if options is None else quietly(make(list(model)), **options)
    refused = {"wrapped": message} if options is None else {"wrapped": message, "own": "got the state of AdamW8bit"}
    for name, expected in refused.items():
        with pytest.raises(CheckpointError, match=expected):
            shardopt.checkpoint.load(tmp_path / name, model, again)
        assert not again.state


def _options(index: dict[str, Any]) -> Any:
    return index["header"]["param_groups"][0]["options"]


def _rename(index: dict[str, Any], new: str) -> None:
    index["tensors"][f"optimizer.0.{new}"] = index["tensors"].pop("optimizer.0.count:int")


#: Changes of an index that no checksum shows, and what an error has; the tables are made to fit.
EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no codec": (lambda index: _options(index).pop("codec"), "expected"),
    "a codec of shardopt's": (lambda index: _options(index).update(codec="log8"), "expected"),
    "an unknown codec": (lambda index: _options(index).update(codec="none by entry"), "expected"),
    "block sizes": (lambda index: _options(index).update(block_size=[128]), "expected"),
    "no signs": (lambda index: _options(index).pop("unsigned"), "expected"),
    "signs": (lambda index: _options(index).update(unsigned=["moment"]), "expected"),
    "no scales": (lambda index: index["tensors"].pop("optimizer.0.moment_scales"), "expected"),
    "another kind": (lambda index: _rename(index, "count:float"), "expected"),
    "an unknown kind": (lambda index: _rename(index, "count:blob"), "expected"),
    "a huge shape": (  # which takes no memory
        lambda index: index["tensors"]["optimizer.0.rows"].update(shape=[2**45]),
        "tensors of more bytes than the data files have",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_damage(tmp_path: Path, name: str) -> None:
    edit, message = EDITS[name]
    model = _model(torch.bfloat16)
    optimizer = _stepped(Custom, model)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    state = State(read_saved(tmp_path))
    edit(state.tree)
    state.fit_names()
    state.write(tmp_path)
    trained(optimizer, list(model))
    before, groups = bits(list(model), optimizer), repr(optimizer.param_groups)
    with pytest.raises(CheckpointError, match=message):
        shardopt.checkpoint.load(tmp_path, model, optimizer)
    assert same(bits(list(model), optimizer), before)
    assert repr(optimizer.param_groups) == groups
