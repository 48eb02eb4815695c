"""Conversions between codecs: the bits of the library's own functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardopt
from convert_runs import PIECE, Net, assert_loads, make, step, trained
from helpers import EIGHT_BIT
from ranks.snapshot import assert_same
from shardopt import checkpoint
from shardopt.checkpoint.convert import convert


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("AdamW", {"codec": "log8"}, {"codec": "companded8"}),
        ("AdamW", {"codec": "log4"}, {"codec": "log8", "block_size": 64}),
        ("AdamW", {"codec": "log8"}, {"codec": "log4"}),
        ("AdamW", {"codec": "dynamic8", "block_size": 256}, {"block_size": 4096}),
        ("AdEMAMix", {"codec": "log8"}, {"codec": "fp32"}),
        ("AdEMAMix", {"codec": "fp32"}, {"codec": "log8"}),
        ("Lion", {"codec": "bf16"}, {"codec": "dynamic8"}),
        ("SGD", {"codec": "companded8", "momentum": 0.9}, {"codec": "bf16"}),
        ("NAdam", {"codec": "fp32"}, {"codec": "companded8", "block_size": 16}),
    ],
)
def test_other_codecs_have_the_bits_of_load_with_convert(
    tmp_path: Path, kind: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    checkpoint.save(tmp_path / "saved", *trained(kind, **before), epoch=3, noise=torch.arange(4.0))
    found = convert(tmp_path / "saved", tmp_path / "converted", **after, piece_numel=PIECE)
    options = {**before, **after}
    expected = make(kind, **options)
    loaded = checkpoint.load(tmp_path / "saved", *expected, convert=True)
    assert found.states == loaded.converted
    assert_loads(tmp_path / "converted", expected, kind, **options)
    extra = checkpoint.load(tmp_path / "converted", *make(kind, **options)).extra
    assert extra["epoch"] == 3
    assert torch.equal(extra["noise"], torch.arange(4.0))


@pytest.mark.parametrize("codec", [*EIGHT_BIT, "log4", "bf16", "fp32"])
def test_the_same_options_change_no_bit(tmp_path: Path, codec: str) -> None:
    run = trained(codec=codec)
    checkpoint.save(tmp_path / "saved", *run)
    found = convert(tmp_path / "saved", tmp_path / "converted", codec=codec, piece_numel=PIECE)
    assert found.states == {}
    assert_loads(tmp_path / "converted", run, codec=codec)


@pytest.mark.parametrize("bits", [24, 32])
def test_master_weights(tmp_path: Path, bits: int) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "master_weight_bits": bits}
    checkpoint.save(tmp_path / "saved", *trained(**options))
    convert(tmp_path / "saved", tmp_path / "converted", codec="companded8", piece_numel=PIECE)
    expected = make(**options, codec="companded8")
    checkpoint.load(tmp_path / "saved", *expected, convert=True)
    assert_loads(tmp_path / "converted", expected, **options, codec="companded8")


def test_model_alone(tmp_path: Path) -> None:
    model = Net()
    checkpoint.save(tmp_path / "saved", model)
    convert(tmp_path / "saved", tmp_path / "converted", piece_numel=PIECE)
    other = Net()
    checkpoint.load(tmp_path / "converted", other)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    with pytest.raises(checkpoint.CheckpointError, match="no optimizer, expected one of an optimizer of shardopt"):
        convert(tmp_path / "saved", tmp_path / "other", codec="log8")
    assert not (tmp_path / "other").exists()


def test_the_other_names_of_shared_parameters_stay(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    checkpoint.save(tmp_path / "source", model, shardopt.AdamW8bit(model.parameters()))
    convert(tmp_path / "source", tmp_path / "target", codec="log8")
    head = torch.nn.ModuleDict({"head": torch.nn.Linear(3, 5, bias=False)})
    checkpoint.load(tmp_path / "target", head)
    assert torch.equal(head["head"].weight, model["embed"].weight)


def test_quantize_state_is_copied(tmp_path: Path) -> None:
    def quantized() -> tuple[Net, Any]:
        torch.manual_seed(0)
        model = Net()
        return model, shardopt.quantize_state(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))

    model, optimizer = quantized()
    step(model, optimizer)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    convert(tmp_path / "saved", tmp_path / "converted", piece_numel=PIECE)
    loaded = []
    for name in ("saved", "converted"):
        other = quantized()
        checkpoint.load(tmp_path / name, *other)
        step(*other)
        loaded.append(dict(other[0].state_dict()))
    assert_same(loaded[0], loaded[1])
