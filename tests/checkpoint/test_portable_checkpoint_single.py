"""The portable checkpoint in one process: what it holds, what it converts, what it refuses."""

from __future__ import annotations

import json
import math
import re
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardopt
from attack.contents import Content, fingerprint
from attack.index_file import with_checksum
from checkpoint_runs import assert_refuses, everything, step_with, trained
from shardopt.checkpoint import CheckpointError


@pytest.fixture
def run(tmp_path: Path) -> Content:
    """A model and its optimizer, which are saved in tmp_path."""
    found = trained()
    shardopt.checkpoint.save(tmp_path, *found)
    return found


def _bare(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


TEXTS = ["", "a\nb", "NaN", "$numberDouble", "$$numberDouble", "\ud800", "\0", "\u2028", "k" * 300]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2**63, 10**400, 0.1, 5e-324, 1e308, math.nan, math.inf, -math.inf, -0.0),
    *TEXTS,
    *([text, math.nan] for text in TEXTS),
    *({text: {text: [math.inf]}} for text in TEXTS),
    *({text: value} for text in TEXTS for value in ("NaN", 1, [], {})),
    {text: {other: -math.inf} for text in TEXTS for other in TEXTS},
]


def test_extra_values_come_back_exactly(tmp_path: Path) -> None:
    """Every parser reads the index, whatever numbers JSON does not have."""
    shardopt.checkpoint.save(tmp_path, nn.Linear(2, 1), values=VALUES)
    json.loads((tmp_path / "checkpoint.json").read_text(), parse_constant=_bare)
    assert fingerprint(shardopt.checkpoint.load(tmp_path, nn.Linear(2, 1)).extra) == fingerprint({"values": VALUES})


def nested(depth: int, kind: str = "lists") -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if kind == "dicts" else [value]
    return value


CIRCLE: list[Any] = []
CIRCLE.append({"a": CIRCLE})
SCHEDULER = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD([torch.ones(1)]), 10)
NO_EXTRAS: dict[str, tuple[Any, str]] = {
    "a scheduler": (SCHEDULER, r"CosineAnnealingLR.*scheduler\.state_dict\(\)"),
    "a key of MultiStepLR": ({"milestones": {30: 1}}, r"extra\.x\.milestones: got the key 30, expected text"),
    "a nested key": ([{"a": 0}, ({None: 2},)], r"extra\.x: got the key None,"),
    "lists": (nested(2000), r"extra\.x.*: got lists and dicts nested more than 100 deep, or in a circle"),
    "dicts": (nested(100_000, "dicts"), "nested more than 100 deep"),
    "a circle": (CIRCLE, "or in a circle"),
    "a set": ([1, {"a": {1, 2}}], "set"),
    "bytes": (b"bytes", "bytes"),
    "a number of 32 bits": (np.float32(1), "float32"),
}


@pytest.mark.parametrize("name", NO_EXTRAS)
def test_extra_values_that_json_does_not_have(tmp_path: Path, name: str) -> None:
    """A refused save changes nothing. A hundred levels, which every parser reads, are saved."""
    extra, message = NO_EXTRAS[name]
    shardopt.checkpoint.save(tmp_path, nn.Linear(8, 8), deep=nested(100))
    with pytest.raises(TypeError, match=message) as caught:
        shardopt.checkpoint.save(tmp_path, nn.Linear(8, 8), x=extra)
    assert str(caught.value).isprintable()
    assert shardopt.checkpoint.load(tmp_path, nn.Linear(8, 8)).extra == {"deep": nested(100)}


def test_an_index_with_the_bare_words_of_before(tmp_path: Path) -> None:
    """Python's words for numbers that JSON does not have; in param groups, too."""
    model, optimizer = trained()
    optimizer.param_groups[0]["limits"] = (-math.inf, math.inf)
    shardopt.checkpoint.save(tmp_path, model, optimizer, losses=[1.5, math.nan, {"least": -math.inf}])
    index = tmp_path / "checkpoint.json"
    text = re.sub(r'\{"\$numberDouble": "(-?\w+)"\}', r"\1", index.read_text()).rpartition(",\n")[0].encode()
    assert b'"losses": [1.5, NaN, {"least": -Infinity}]' in text
    index.write_bytes(with_checksum(text))
    other, fresh = trained(seed=7, steps=0)
    found = shardopt.checkpoint.load(tmp_path, other, fresh).extra
    assert fresh.param_groups[0]["limits"] == (-math.inf, math.inf)
    assert math.isnan(found["losses"].pop(1))
    assert found == {"losses": [1.5, {"least": -math.inf}]}


def test_a_model_alone(tmp_path: Path) -> None:
    model, _ = trained()
    shardopt.checkpoint.save(tmp_path, model)
    other, fresh = trained(seed=7)
    before = fingerprint(fresh.state_dict())
    shardopt.checkpoint.load(tmp_path, other)
    assert fingerprint(other.state_dict()) == fingerprint(model.state_dict())
    assert fingerprint(fresh.state_dict()) == before
    with pytest.raises(CheckpointError, match="without an optimizer"):
        shardopt.checkpoint.load(tmp_path, other, fresh)


def test_before_the_first_step_there_is_no_state(tmp_path: Path) -> None:
    model, optimizer = trained(steps=0)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    other, stepped = trained(seed=7)
    shardopt.checkpoint.load(tmp_path, other, stepped)
    assert not stepped.state
    assert everything(other, stepped) == everything(model, optimizer)


@pytest.mark.parametrize(
    "options",
    [{"codec": "dynamic8"}, {"block_size": 32}, {"codec": "fp32"}, {"min_quantized_numel": 10**6}],
    ids=str,
)
def test_another_codec_is_converted_on_demand(tmp_path: Path, run: Content, options: dict[str, Any]) -> None:
    """As by way of torch's float32 state."""
    assert_refuses(tmp_path, r"saved with log8 in blocks of 128, this optimizer has .*convert=True", **options)
    (other, fresh), (_, expected) = trained(seed=7, **options), trained(seed=8, **options)
    loaded = shardopt.checkpoint.load(tmp_path, other, fresh, convert=True)
    assert loaded.converted.keys() == {"weight", "square", "brain"}
    expected.load_state_dict(run.optimizer.state_dict(dequantize=True))
    assert fingerprint(fresh.state_dict()["state"]) == fingerprint(expected.state_dict()["state"])
    assert {key: fresh.param_groups[0][key] for key in options} == options
    step_with(other, fresh, 9)


def test_hyper_parameters_that_a_load_changes(tmp_path: Path, run: Content, caplog: pytest.LogCaptureFixture) -> None:
    """Changes are listed, and left out if asked for; what steps keep in param groups is loaded all the same."""
    other, fresh = trained(seed=7, weight_decay=0.5)
    kept = shardopt.checkpoint.load(tmp_path, other, fresh, hyper_parameters="keep")
    assert (kept.hyper_parameters, fresh.param_groups[0]["weight_decay"], caplog.messages) == ({}, 0.5, [])
    assert fingerprint(fresh.state_dict()["state"]) == fingerprint(run.optimizer.state_dict()["state"])
    fresh.param_groups[0] |= {"lr": torch.tensor(0.25), "initial_lr": 0.25}  # of a schedule that the saved one lacked
    found = [shardopt.checkpoint.load(tmp_path, other, fresh).hyper_parameters for _ in range(2)]
    assert found == [{0: {"lr": (0.25, pytest.approx(0.01)), "weight_decay": (0.5, 0.01)}}, {}]
    (message,) = caplog.messages
    assert message.startswith("load changed lr of param group 0 from 0.25 to 0.0")
    with pytest.raises(ValueError, match="hyper_parameters: got 'mine', expected 'saved' or 'keep'"):
        shardopt.checkpoint.load(tmp_path, other, fresh, hyper_parameters="mine")  # type: ignore[arg-type]


class Renaming(torch.optim.Optimizer):
    """Takes its learning rate by another name, and counts steps in its param groups."""

    def __init__(self, params: Any, rate: float = 0.5) -> None:
        super().__init__(params, {"lr": rate, "count": 0})

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["count"] += 1


@pytest.mark.filterwarnings("ignore:got Renaming, untested")
@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        (shardopt.Prodigy8bit, "d"),
        (shardopt.NAdam8bit, "past_mu"),
        (torch.optim.NAdam, "initial_lr"),
        (Renaming, "count"),
    ],
)
def test_values_in_param_groups_that_are_no_hyper_parameters(tmp_path: Path, kind: Any, entry: str) -> None:
    """Values of steps are loaded whatever is kept; those of a schedule with the same initial rate are not listed."""
    weight = nn.Linear(64, 64)

    def stepped(steps: int) -> Any:
        optimizer = kind(weight.parameters())
        if not isinstance(optimizer, shardopt.optim.ShardedOptimizer):
            optimizer = shardopt.quantize_state(optimizer)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(steps):
            weight(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            schedule.step()
        return optimizer

    optimizer, fresh = stepped(3), stepped(1)
    shardopt.checkpoint.save(tmp_path, weight, optimizer)
    own, saved = dict(fresh.param_groups[0]), optimizer.param_groups[0]
    assert shardopt.checkpoint.load(tmp_path, weight, fresh, hyper_parameters="keep").hyper_parameters == {}
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0][entry]) == (own["lr"], saved[entry])
    assert shardopt.checkpoint.load(tmp_path, weight, fresh).hyper_parameters == {}
    assert fresh.param_groups[0]["lr"] == saved["lr"] != own["lr"]


@pytest.mark.parametrize(("saved", "own"), [(24, 32), (32, 24), (24, None), (None, 32), (32, None)])
def test_other_master_weights_are_converted_on_demand(tmp_path: Path, saved: int | None, own: int | None) -> None:
    model, optimizer = trained(master_weight_bits=saved)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    assert_refuses(tmp_path, "low bits", master_weight_bits=own)
    other, fresh = trained(seed=7, master_weight_bits=own)
    loaded = shardopt.checkpoint.load(tmp_path, other, fresh, convert=True)
    assert loaded.converted.keys() == {"brain"}
    got, expected = fresh.full_precision_parameters()[other.brain], optimizer.full_precision_parameters()[model.brain]
    if own == 24 and saved == 32:
        assert ((got - expected).abs() <= expected.abs() * 2**-16).all()  # half a place of 16 bits of mantissa
    else:
        assert torch.equal(got, expected.to(torch.bfloat16 if own is None else torch.float32).float())
    step_with(other, fresh, 9)


def test_a_parameter_of_another_dtype_is_converted_on_demand(tmp_path: Path, run: Content) -> None:
    model, _ = run
    other, fresh = trained(seed=7, steps=0)
    other.weight.data = other.weight.data.bfloat16()
    with pytest.raises(CheckpointError, match=r"saved in torch.float32 .*, this model has torch.bfloat16"):
        shardopt.checkpoint.load(tmp_path, other, fresh)
    shardopt.checkpoint.load(tmp_path, other, fresh, convert=True)
    assert torch.equal(other.weight, model.weight.bfloat16())


def test_other_parameters_are_refused(tmp_path: Path, run: Content) -> None:
    model, optimizer = run
    with pytest.raises(
        CheckpointError,
        match=r"parameters that the model has not.*expected the optimizer of this model; make it after fully_shard",
    ):
        shardopt.checkpoint.save(tmp_path, trained(3).model, optimizer)
    with pytest.raises(TypeError, match="got an optimizer of SGD"):
        shardopt.checkpoint.save(tmp_path, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match="got no state of frozen"):
        shardopt.checkpoint.load(tmp_path, model, shardopt.AdamW8bit(model.parameters()))


def test_groups_may_be_split_but_not_merged(tmp_path: Path) -> None:
    model, _ = trained()
    groups = [{"params": [model.weight, model.brain], "weight_decay": 0.5}, {"params": [model.bias]}]
    optimizer = shardopt.AdamW8bit(groups)
    step_with(model, optimizer, 1)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    split = shardopt.AdamW8bit([{"params": [p]} for p in (model.brain, model.weight, model.bias)])
    shardopt.checkpoint.load(tmp_path, model, split)
    assert [group["weight_decay"] for group in split.param_groups] == [0.5, 0.5, 0.01]
    merged = shardopt.AdamW8bit([model.weight, model.brain, model.bias])
    with pytest.raises(CheckpointError, match="different weight_decay"):
        shardopt.checkpoint.load(tmp_path, model, merged)


# --- mistakes in the arguments, and the remedies in the messages


def test_another_model_is_told_by_what_differs_alone(tmp_path: Path) -> None:
    shardopt.checkpoint.save(tmp_path, nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(CheckpointError) as raised:
        shardopt.checkpoint.load(tmp_path, nn.Sequential(nn.Linear(8, 4)))
    assert "shapes saved and in the model differ: model.0.bias (8,) and (4,), model.0.weight" in str(raised.value)
    assert "does not have" not in str(raised.value)
    with pytest.raises(
        CheckpointError, match=r"the checkpoint does not have model\.1\.bias, model\.1\.weight; expected"
    ):
        shardopt.checkpoint.load(tmp_path, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def test_arguments_in_another_order(tmp_path: Path) -> None:
    model, optimizer = trained()
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((model, optimizer, tmp_path), r"got Small for a path.*save\(path, model, optimizer\)"),
        ((tmp_path, optimizer), "got AdamW8bit for the model, expected a module"),
        ((tmp_path, model, optimizer.state_dict()), "got a state dict for the optimizer; pass the optimizer itself"),
        ((tmp_path, model.state_dict()), "got a state dict for the model; pass the module itself"),
    ]
    for given, message in wrong:
        for function in (shardopt.checkpoint.save, shardopt.checkpoint.async_save, shardopt.checkpoint.load):
            with pytest.raises(TypeError, match=message):
                function(*given)


def test_an_error_is_printed_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        shardopt.checkpoint.load(tmp_path, nn.Linear(2, 1))
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("CheckpointError: ") == printed.count("Error: ") == 1


def test_another_optimizer_is_told_the_model_alone(tmp_path: Path, run: Content) -> None:
    refused = (
        r"saved by AdamW8bit, expected .* of Lion8bit; load it into AdamW8bit, or the model alone: load\(path, model\)"
    )
    other = shardopt.Lion8bit([param for param in run.model.parameters() if param.requires_grad])
    with pytest.raises(CheckpointError, match=refused):
        shardopt.checkpoint.load(tmp_path, run.model, other)


class _Entered(Exception):
    """Raised with the device that becomes the current one."""


def _enter(device: torch.device) -> Any:
    raise _Entered(device)


@pytest.mark.parametrize("call", [shardopt.checkpoint.save, shardopt.checkpoint.async_save, shardopt.checkpoint.load])
def test_the_models_gpu_becomes_the_current_one(call: Any, tmp_path: Path) -> None:
    """Messages go through it, whichever was the current one."""
    second = torch.device("cuda", 1)
    with FakeTensorMode():
        model = nn.LayerNorm(4, device=second)
    with patch.object(torch.cuda, "device", _enter), pytest.raises(_Entered) as caught:
        call(tmp_path, model)
    assert caught.value.args == (second,)
