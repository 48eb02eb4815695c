"""Portable checkpoints of quantize_state in one process: entries that are no tensors, groups, damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from attack.index_file import read_index, write_fitting, write_index
from shardopt import quantize_state
from shardopt.checkpoint import CheckpointError
from wrapped import BY_PARAMETER, Counting, Custom, bits, of, parameters, quietly, same, trained


def _shown(optimizer: Any, param: torch.Tensor) -> str:
    """The state of a parameter: types, dtypes and all values."""
    items = sorted(optimizer.state[param].items())
    return repr([(key, x.dtype, x.tolist()) if isinstance(x, torch.Tensor) else (key, x) for key, x in items])


def _model(dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    return nn.ParameterList(parameters(dtype))


def _stepped(make: Any, model: nn.ParameterList, **options: Any) -> Any:
    return trained(quietly(make(list(model)), **options), list(model))


@pytest.fixture
def run(tmp_path: Path) -> tuple[nn.ParameterList, Any]:
    """A model and a stepped optimizer of many kinds of entries, which are saved in tmp_path."""
    model = _model()
    optimizer = _stepped(Counting, model)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    return model, optimizer


@pytest.mark.parametrize(
    "value",
    [None, True, -7, 2**62, 0.1, float("inf"), "täxt", "", torch.bfloat16, [], [1, (None, ["a"])], torch.arange(3)],
    ids=str,
)
def test_values_that_are_no_tensors(tmp_path: Path, run: Any, value: Any) -> None:
    model, optimizer = run
    optimizer.state["x"] = value
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    del optimizer.state["x"]
    shardopt.checkpoint.load(tmp_path, model, optimizer)
    assert type(optimizer.state["x"]) is type(value)
    assert repr(optimizer.state["x"]) == repr(value)


@pytest.mark.parametrize("value", [{"a": 1}, 2**63, 1j, {1}, [[[[[[[[[[1]]]]]]]]]]], ids=str)
def test_values_that_a_checkpoint_cannot_hold(tmp_path: Path, run: Any, value: Any) -> None:
    model, optimizer = run
    for key, message in (("x", r"state entry x.*save optimizer.state_dict"), ("a.b", r"got a state entry 'a\.b'")):
        optimizer.state[key] = value
        with pytest.raises(CheckpointError, match=message):
            shardopt.checkpoint.save(tmp_path, model, optimizer)
        del optimizer.state[key]


def test_a_state_that_a_checkpoint_cannot_hold(tmp_path: Path) -> None:
    model = _model()
    optimizer = _stepped(Counting, model)
    optimizer.state[model[0]]["projector"] = object()
    with pytest.raises(CheckpointError, match="state entry projector of object"):
        shardopt.checkpoint.save(tmp_path, model, optimizer)
    assert not (tmp_path / "checkpoint.json").exists()
    del optimizer.state[model[0]]["projector"]
    optimizer.param_groups[0]["vector"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match="vector of a param group"):
        shardopt.checkpoint.save(tmp_path, model, optimizer)


@pytest.mark.parametrize("make", [Counting, BY_PARAMETER["torch Adafactor"], of("torch.optim", "AdamW", fused=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_comes_back(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    model, other = _model(dtype), _model(dtype)
    optimizer = _stepped(make, model)
    optimizer.state["total"] = 3
    optimizer.param_groups[0]["tag"] = ("a", 1)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    again = quietly(make(list(other)), working_memory=0)
    again.state["other"] = torch.ones(2)
    trained(again, list(other), range(50, 52))
    shardopt.checkpoint.load(tmp_path, other, again)
    assert [key for key in again.state if isinstance(key, str)] == ["total"]
    assert again.state["total"] == 3
    for _ in range(2):
        for param, old in zip(other, model, strict=True):
            assert torch.equal(param, old)
            assert _shown(again, param) == _shown(optimizer, old)
        groups = [{k: x for k, x in group.items() if k != "params"} for group in optimizer.param_groups]
        assert repr([{k: x for k, x in again.param_groups[0].items() if k != "params"}]) == repr(groups)
        for each, params in ((optimizer, model), (again, other)):
            trained(each, list(params), range(4, 6))


def test_counters_that_a_checkpoint_has_not(tmp_path: Path) -> None:
    model = _model()
    shardopt.checkpoint.save(tmp_path, model, quietly(Counting(list(model))))
    optimizer = _stepped(Counting, model)
    optimizer.param_groups[0]["decay_of"] = print
    shardopt.checkpoint.load(tmp_path, model, optimizer)
    assert optimizer.param_groups[0].keys() == {"params", "lr", "decay_of"}
    assert not optimizer.state


def test_a_tensor_as_learning_rate(tmp_path: Path) -> None:
    model = _model()
    optimizer = _stepped(lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.25), foreach=False), model)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    fresh = quantize_state(torch.optim.AdamW(list(model), lr=1.0))
    shardopt.checkpoint.load(tmp_path, model, fresh)
    assert fresh.param_groups[0]["lr"] == 0.25
    assert isinstance(fresh.param_groups[0]["lr"], float)
    assert fresh.param_groups[0]["foreach"] is None
    shardopt.checkpoint.save(tmp_path, model, fresh)
    lr = optimizer.param_groups[0]["lr"]
    lr.fill_(3.0)
    shardopt.checkpoint.load(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.25


@pytest.mark.parametrize(("saved", "own"), [((1,), ()), ((), (1,))])
def test_tensors_in_param_groups_keep_their_shapes(tmp_path: Path, saved: Any, own: Any) -> None:
    """A tensor is copied into, and the copy must not fail when weights are loaded already."""
    model = _model()
    optimizer = quantize_state(torch.optim.AdamW(list(model), lr=torch.full(saved, 0.25), foreach=False))
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    again = quantize_state(torch.optim.AdamW(list(model), lr=torch.zeros(own), foreach=False))
    shardopt.checkpoint.load(tmp_path, model, again)
    assert torch.equal(again.param_groups[0]["lr"], torch.full(own, 0.25))


def test_tensors_of_several_elements_in_param_groups(tmp_path: Path, run: Any) -> None:
    model, optimizer = run
    trained(optimizer, list(model))
    optimizer.param_groups[0]["scale"] = torch.ones(3)
    before = bits(list(model), optimizer)
    with pytest.raises(CheckpointError, match=r"got scale as .*expected a number"):
        shardopt.checkpoint.load(tmp_path, model, optimizer)
    assert same(bits(list(model), optimizer), before)
    optimizer.param_groups[0]["scale"] = torch.tensor(1j)
    with pytest.raises(CheckpointError, match=r"scale of a param group as a tensor of shape \(\) and torch.complex64"):
        shardopt.checkpoint.save(tmp_path, model, optimizer)


@pytest.mark.parametrize("wrap", [lambda groups: quantize_state(torch.optim.AdamW(groups)), shardopt.AdamW8bit])
def test_a_param_group_without_parameters(tmp_path: Path, wrap: Any) -> None:
    model = _model()
    optimizers = [wrap([{"params": list(model)}, {"params": [], "lr": lr}]) for lr in (0.5, 0.25)]
    shardopt.checkpoint.save(tmp_path, model, trained(optimizers[0], list(model)))
    shardopt.checkpoint.load(tmp_path, model, optimizers[1])
    assert same(bits(list(model), optimizers[1]), bits(list(model), optimizers[0]))
    assert optimizers[1].param_groups[1]["lr"] == 0.25


def test_copies_of_weights_stay_what_they_are(tmp_path: Path) -> None:
    """Entries that were found to be copies are in floats, and stay so."""
    model = _model()
    optimizer = _stepped(Custom, model)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    again = quietly(Custom(list(model)))
    shardopt.checkpoint.load(tmp_path, model, again)
    trained(again, list(model))
    assert "start" in again.state[model[0]]
    assert "squares_dtype" not in again.state[model[0]]


def test_dtypes_of_their_own(tmp_path: Path) -> None:
    model = _model(torch.bfloat16)
    optimizer = _stepped(Custom, model)
    assert optimizer.state[model[0]]["squares_dtype"] == torch.float32
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    again = quietly(Custom(list(model)))
    shardopt.checkpoint.load(tmp_path, model, again)
    assert _shown(again, model[0]) == _shown(optimizer, model[0])


@pytest.mark.parametrize(("saved", "own"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_conversion_of_weights(tmp_path: Path, saved: torch.dtype, own: torch.dtype) -> None:
    model, other = _model(saved), _model(own)
    optimizer = _stepped(torch.optim.AdamW, model)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    again = _stepped(torch.optim.AdamW, other)
    with pytest.raises(CheckpointError, match="weights of 0 low bits for"):
        shardopt.checkpoint.load(tmp_path, other, again)
    shardopt.checkpoint.load(tmp_path, other, again, convert=True)
    for param, old in zip(other, model, strict=True):
        assert torch.equal(param, old.to(own))
        for key, value in optimizer.state[old].items():
            like = value if value.dim() == 0 or key.endswith(("_codes", "_scales")) else value.to(own)
            assert again.state[param][key].dtype == like.dtype
            assert torch.equal(again.state[param][key], like)
    trained(again, list(other), range(1))


def test_one_of_shardopt_is_another_optimizer(tmp_path: Path) -> None:
    model = _model()
    wrapped, own = _stepped(torch.optim.AdamW, model), shardopt.AdamW8bit(model.parameters())
    trained(own, list(model))
    shardopt.checkpoint.save(tmp_path / "own", model, own)
    shardopt.checkpoint.save(tmp_path / "wrapped", model, wrapped)
    for name, optimizer, got in (("own", wrapped, "AdamW8bit"), ("wrapped", own, "quantize_state of torch.AdamW")):
        before = bits(list(model), optimizer)
        with pytest.raises(CheckpointError, match=f"got the state of {got}, expected that of .*; load it into"):
            shardopt.checkpoint.load(tmp_path / name, model, optimizer)
        assert same(bits(list(model), optimizer), before)


def _options(index: dict[str, Any]) -> Any:
    return index["header"]["param_groups"][0]["options"]


#: Changes of an index that no checksum shows; the tables are made to fit.
EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no codec": lambda index: _options(index).pop("codec"),
    "a codec of shardopt's": lambda index: _options(index).update(codec="log8"),
    "an unknown codec": lambda index: _options(index).update(codec="none by entry"),
    "block sizes": lambda index: _options(index).update(block_size=[128]),
    "no signs": lambda index: _options(index).pop("unsigned"),
    "signs": lambda index: _options(index).update(unsigned=[1]),
    "a counter": lambda index: _options(index).update(scale={"tensor": "x", "dtype": "torch.float32", "shape": []}),
    "a dtype": lambda index: _options(index).update(scale={"tensor": 1, "dtype": "torch.qint8", "shape": [3]}),
    "several numbers": lambda index: _options(index).update(
        scale={"tensor": [1.0, 2.0], "dtype": "torch.float32", "shape": [2]}
    ),
    "no scales": lambda index: index["tensors"].pop("optimizer.0.average_scales"),
    "no items": lambda index: index["tensors"].pop("optimizer.0.names:0:text"),
    "another kind": lambda index: index["tensors"].update(
        {"optimizer.0.count:float": index["tensors"].pop("optimizer.0.count:int")}
    ),
    "a kind": lambda index: index["tensors"].update(
        {"optimizer.0.count:blob": index["tensors"].pop("optimizer.0.count:int")}
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_damage(tmp_path: Path, run: Any, edit: str) -> None:
    model, optimizer = run
    index = read_index(tmp_path)
    EDITS[edit](index)
    write_fitting(tmp_path, index)
    trained(optimizer, list(model))
    before, groups = bits(list(model), optimizer), repr(optimizer.param_groups)
    with pytest.raises(CheckpointError) as raised:
        shardopt.checkpoint.load(tmp_path, model, optimizer)
    assert "expected" in str(raised.value), raised.value
    assert same(bits(list(model), optimizer), before)
    assert repr(optimizer.param_groups) == groups


def test_damaged_dtypes(tmp_path: Path) -> None:
    model = _model(torch.bfloat16)
    optimizer = _stepped(Custom, model)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    index = read_index(tmp_path)
    index["tensors"]["optimizer.0.squares_dtype:dtype"]["dtype"] = "int32"
    write_index(tmp_path, index)
    with pytest.raises(CheckpointError, match=r"squares_dtype as torch\.int32, expected torch\.float32"):
        shardopt.checkpoint.load(tmp_path, model, optimizer)


def test_huge_entries_of_an_index_take_no_memory(tmp_path: Path, run: Any) -> None:
    model, optimizer = run
    index = read_index(tmp_path)
    text = json.dumps(index)
    assert "optimizer.0.names:0:text" in text
    size = 2**45
    index["tensors"]["optimizer.0.names:0:text"]["shape"] = [size]
    write_index(tmp_path, index)
    with pytest.raises(CheckpointError, match="got tensors of more bytes than the data files have"):
        shardopt.checkpoint.load(tmp_path, model, optimizer)
    index["files"][0][0] = 2 * size
    write_index(tmp_path, index)
    with pytest.raises(CheckpointError, match=rf"-0\.bin: got \d+ bytes, expected {2 * size + index['files'][0][1]}"):
        shardopt.checkpoint.load(tmp_path, model, optimizer)
