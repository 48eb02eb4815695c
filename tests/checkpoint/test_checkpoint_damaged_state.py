"""Checkpoints and imports with options or state that no step could go on from: refused, nothing is changed."""

from __future__ import annotations

import copy
import json
import math
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardopt
from checkpoint_runs import Small, assert_refuses, step_with, trained
from foreign_states import by_hand, params_of
from helpers import CODEC_NAMES
from ranks.snapshot import assert_same, snapshot
from shardopt.checkpoint import CheckpointError, import_state
from shardopt.optim import ShardedOptimizer

NAN, INF = math.nan, math.inf
Header = dict[str, Any]


def rewrite(folder: Path, change: Callable[[Header], object]) -> None:
    """Changes the header of a checkpoint, and its checksum with it."""
    content = json.loads((folder / "checkpoint.json").read_text())
    del content["crc32"]
    change(content["header"])
    text = json.dumps(content)[:-1].encode()
    (folder / "checkpoint.json").write_bytes(text + f',\n"crc32": "{zlib.crc32(text):08x}"}}\n'.encode())


def option(**options: Any) -> Callable[[Header], object]:
    return lambda header: header["param_groups"][0]["options"].update(options)


HEADERS: dict[str, tuple[Callable[[Header], object], str]] = {
    "lr abc": (option(lr="abc"), "param group 0: lr: got 'abc', expected a number >= 0"),
    "lr nan": (option(lr=NAN), "param group 0: lr: got nan"),
    "lr 1e39": (option(lr=1e39), "param group 0: lr: got 1e+39"),
    "lr a list": (option(lr=[1e-3]), "param group 0: lr: got [0.001]"),
    "lr a large number": (option(lr=10**400), "param group 0: lr: got 1000"),
    "betas": (option(betas=[2, 3]), "param group 0: betas[0]: got 2, expected a number in [0.0, 1.0)"),
    "betas a number": (option(betas=0.9), "param group 0: betas: got 0.9"),
    "weight_decay": (option(weight_decay=INF), "param group 0: weight_decay: got inf"),
    "maximize": (option(maximize="yes"), "param group 0: maximize: got 'yes'"),
    "nonfinite": (option(nonfinite=[]), "param group 0: nonfinite: got []"),
    "codec": (option(codec=["log8"]), "param group 0: codec: got ['log8']"),
    "block_size": (option(block_size=0), "param group 0: block_size: got 0"),
    "min_quantized_numel": (option(min_quantized_numel="x"), "param group 0: min_quantized_numel: got 'x'"),
    "master_weight_bits": (option(master_weight_bits=7), "param group 0: master_weight_bits: got 7"),
    "no list": (lambda h: h.update(param_groups={"a": 1}), "got param_groups as dict, expected a list"),
    "no dict": (lambda h: h.update(param_groups=[3]), "param group 0: got no parameters, expected a list of names"),
    "no parameters": (lambda h: h["param_groups"][0].pop("parameters"), "param group 0: got no parameters"),
    "no names": (lambda h: h["param_groups"][0].update(parameters=[1, 2]), "param group 0: got no parameters"),
    "no options": (lambda h: h["param_groups"][0].update(options=[1]), "param group 0: got no options"),
}


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("name", HEADERS)
def test_headers(tmp_path: Path, name: str, convert: bool) -> None:
    shardopt.checkpoint.save(tmp_path, *trained())
    change, message = HEADERS[name]
    rewrite(tmp_path, change)
    assert_refuses(tmp_path, re.escape(f"{tmp_path}: {message}"), convert=convert)


def test_a_header_that_was_only_rewritten_loads(tmp_path: Path) -> None:
    shardopt.checkpoint.save(tmp_path, *trained())
    rewrite(tmp_path, option(lr=0.5, params=[1], param_names=["a"]))
    other, fresh = trained(seed=7)
    params = fresh.param_groups[0]["params"]
    shardopt.checkpoint.load(tmp_path, other, fresh)
    assert fresh.param_groups[0]["lr"] == 0.5
    assert fresh.param_groups[0]["params"] is params
    assert "param_names" not in fresh.param_groups[0]


@pytest.mark.parametrize("lr", ["abc", NAN, [1, 2], None, 10**400])
def test_a_learning_rate_on_a_tensor_takes_no_other_value(tmp_path: Path, lr: Any) -> None:
    """Not even one on a device, which is not read."""
    shardopt.checkpoint.save(tmp_path, *trained())
    rewrite(tmp_path, option(lr=lr))
    other, fresh = trained(seed=7)
    for own in (torch.tensor(0.5), torch.tensor(0.5, device="meta")):
        fresh.param_groups[0]["lr"] = own
        with pytest.raises(CheckpointError, match="param group 0: lr: got"):
            shardopt.checkpoint.load(tmp_path, other, fresh)
        assert fresh.param_groups[0]["lr"] is own


def test_stochastic_rounding_is_not_taken_over_with_other_master_weights(tmp_path: Path) -> None:
    """The two exclude each other: the load went well, and the next step failed."""
    model, optimizer = trained(stochastic_rounding=True)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    other, fresh = trained(seed=7, master_weight_bits=24)
    shardopt.checkpoint.load(tmp_path, other, fresh, convert=True)
    assert (fresh.param_groups[0]["stochastic_rounding"], fresh.param_groups[0]["master_weight_bits"]) == (False, 24)
    step_with(other, fresh, 9)


DAMAGE = {
    "scales": ("weight", "exp_avg_scales", NAN),
    "scales of the second moment": ("weight", "exp_avg_sq_scales", -1.0),
    "a moment": ("bias", "exp_avg", INF),
    "the second moment": ("bias", "exp_avg_sq", -1.0),
    "no number of steps": ("bias", "step", NAN),
    "steps below zero": ("weight", "step", -5.0),
}


def damage(model: Small, optimizer: ShardedOptimizer, name: str) -> str:
    """Puts a value into the state of a parameter, and says which."""
    parameter, entry, value = DAMAGE[name]
    optimizer.state[model.get_parameter(parameter)][entry].view(-1)[0] = value
    return parameter


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("name", DAMAGE)
def test_states_in_a_checkpoint(tmp_path: Path, name: str, convert: bool) -> None:
    """Also where they are converted."""
    model, optimizer = trained()
    parameter = damage(model, optimizer, name)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    options = {"codec": "dynamic8", "master_weight_bits": 24} if convert else {}
    assert_refuses(tmp_path, re.escape(f"{tmp_path}: {parameter}: got "), convert=convert, **options)
    shardopt.checkpoint.load(tmp_path, Small())  # the model by itself


def test_weights_may_be_infinite(tmp_path: Path) -> None:
    model, optimizer = trained()
    with torch.no_grad():
        model.weight[0, :2] = torch.tensor([NAN, INF])
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    other, fresh = trained(seed=7)
    shardopt.checkpoint.load(tmp_path, other, fresh)
    assert torch.equal(other.weight.isfinite(), model.weight.isfinite())


def wrapped(state_dict: dict[str, Any], index: int) -> dict[str, Any]:
    """The state of a parameter, of bitsandbytes as it wraps it."""
    state: dict[str, Any] = state_dict["state"][index]
    return state.get("__bnb_optimizer_quant_state__", state)


IMPORTS: dict[str, tuple[str, int, Callable[[dict[str, Any]], object]]] = {
    "scale below zero": ("bitsandbytes", 0, lambda s: s["absmax2"].__setitem__(0, -1.0)),
    "scale of nan": ("flashoptim", 0, lambda s: s["exp_avg::scales"].__setitem__(0, NAN)),
    "map of nan": ("bitsandbytes", 0, lambda s: s["qmap1"].fill_(NAN)),
    "map below zero": ("bitsandbytes", 0, lambda s: s["qmap2"].copy_(s["qmap1"])),
    "float of nan": ("torchao", 6, lambda s: s["exp_avg"].__setitem__(0, NAN)),
    "float below zero": ("torchao", 6, lambda s: s["exp_avg_sq"].__setitem__(0, -1.0)),
    "integers": ("torchao", 6, lambda s: s.update(exp_avg=s["exp_avg"].int())),
    "sparse": ("torchao", 6, lambda s: s.update(exp_avg=s["exp_avg"].to_sparse())),
    "step": ("torchao", 6, lambda s: s.update(step=torch.tensor(NAN))),
    "step below zero": ("flashoptim", 0, lambda s: s.update(step=-5)),
}


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("name", IMPORTS)
def test_states_of_other_packages(name: str, codec: str) -> None:
    package, index, change = IMPORTS[name]
    state_dict = copy.deepcopy(by_hand(package)[0])
    change(wrapped(state_dict, index) if "step" not in name else state_dict["state"][index])
    params = params_of()
    ours = shardopt.AdamW8bit(params, codec=codec, block_size=256)
    before = snapshot({str(i): p for i, p in enumerate(params)}, ours)
    with pytest.raises(ValueError, match=rf"^(the\.{index}|state of {index}): "):
        import_state(ours, state_dict, names={f"the.{i}": p for i, p in enumerate(params)})
    assert_same(snapshot({str(i): p for i, p in enumerate(params)}, ours), before)
