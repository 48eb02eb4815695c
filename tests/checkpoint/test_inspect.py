"""The command ``shardopt inspect``: tables of a portable checkpoint, and what it finds wrong."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import shardopt
from attack.index_file import file_name, read_index, read_saved, table_of, write_index
from shardopt.__main__ import main
from shardopt.checkpoint import CheckpointError, load, save
from shardopt.checkpoint.summary import summarize


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64 * 128).view(64, 128).bfloat16())
        self.bias = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.tensor([3.0, 5.0]))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = Small()
    optimizer = shardopt.AdamW4bit(model.parameters(), master_weight_bits=24)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    save(tmp_path / "saved", model, optimizer, epoch=3, best=float("inf"))
    return tmp_path / "saved"


def test_summary(saved: Path) -> None:
    summary = summarize(saved)
    by_name = {each.name: each for each in summary.parameters}
    assert set(by_name) == {"weight", "bias", "seen"}
    weight, bias, seen = by_name["weight"], by_name["bias"], by_name["seen"]
    assert (weight.codec, bias.codec, seen.codec) == ("log4", "fp32", "")
    numel = 64 * 128
    assert weight.nbytes() == {
        "weights": 2 * numel, "codes": numel, "scales": 12 * 64, "moments": 4, "master low bits": numel,
    }  # fmt: skip
    values = weight.values["optimizer.weight.moment_codes"]
    assert int(values.counts.sum()) == numel
    assert values.bits_used == 0  # one gradient for all
    assert (seen.values["model.seen"].low, seen.values["model.seen"].high) == (3, 5)
    assert weight.values["optimizer.weight.step"].low == 1
    assert list(summary.problems()) == []
    assert summarize(saved, values=False).parameters[0].values == {}


def test_tables(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved)]) == 0
    text = capsys.readouterr().out
    for needed in ("saved by AdamW4bit", "extra: epoch", "log4", "64 x 128", "2.094", "No NaN, no infinities."):
        assert needed in text
    assert main(["inspect", str(saved), "--index-only"]) == 0
    assert "The data were not read." in capsys.readouterr().out


def test_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["header"]["extra"] == {"epoch": 3, "best": {"$numberDouble": "Infinity"}}
    assert found["header"]["optimizer"] == "AdamW4bit"
    assert found["problems"] == []
    assert {each["name"]: each["codec"] for each in found["parameters"]}["weight"] == "log4"


def test_nan_and_infinities_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Small()
    with torch.no_grad():
        model.weight[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        model.seen.fill_(torch.nan)
    save(tmp_path / "saved", model, None)
    assert main(["inspect", str(tmp_path / "saved")]) == 1
    text = capsys.readouterr().out
    assert "model.weight: 1 NaN, 2 infinite" in text
    assert "model.seen: 2 NaN, 0 infinite" in text


def test_damage_is_an_error(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data,) = saved.glob("*.bin")
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    assert main(["inspect", str(saved)]) == 1
    assert "checksum" in capsys.readouterr().err
    assert main(["inspect", str(saved / "nothing")]) == 1
    assert "there is no such folder" in capsys.readouterr().err


def test_a_models_own_scales_are_shown_in_full(tmp_path: Path) -> None:
    model = Small()
    model.register_buffer("weight_scales", torch.tensor([[[1.0, 9.0], [2.0, -7.0]]]))
    save(tmp_path, model)
    (found,) = (x.values for x in summarize(tmp_path).parameters if x.name == "weight_scales")
    assert (found["model.weight_scales"].low, found["model.weight_scales"].high) == (-7.0, 9.0)


def test_scales_are_shown_without_the_steps_beside_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Small()
    optimizer = shardopt.AdamW8bit(model.parameters())
    for param in model.parameters():
        param.grad = torch.linspace(0.1, 1, param.numel(), dtype=param.dtype).view_as(param)
    optimizer.step()
    optimizer.state[model.weight]["exp_avg_sq_scales"][0, 0, 1] = torch.inf
    save(tmp_path, model, optimizer)
    scales = optimizer.state[model.weight]["exp_avg_sq_scales"]
    (found,) = (x.values for x in summarize(tmp_path).parameters if x.name == "weight")
    values = found["optimizer.weight.exp_avg_sq_scales"]
    assert (values.low, values.high) == (float(scales[..., 0].min()), float(scales[..., 0].max()))
    assert values.infinite == 1
    assert main(["inspect", str(tmp_path)]) == 1
    first = optimizer.state[model.weight]["exp_avg_scales"]
    ranges = [f"{float(x.min()):.1e} to {float(x.max()):.1e}" for x in (first, scales[..., 0])]
    assert ", ".join(ranges) in capsys.readouterr().out


def test_float8_and_what_no_version_writes(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    values = torch.tensor([1.0, -2.0, float("nan")]).to(torch.float8_e4m3fn)
    save(tmp_path, model, small=values)
    summary = summarize(tmp_path)
    assert summary.others["extra.small"].shape == (3,)
    content = read_index(tmp_path)
    content["header"]["param_groups"] = [{"parameters": 3, "options": []}]
    write_index(tmp_path, content)
    with pytest.raises(CheckpointError, match="param group 0: got no parameters"):
        summarize(tmp_path)


def test_values_of_extra_tensors_are_verified(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(3, 2), small=torch.arange(300))
    (file,) = tmp_path.glob("*.bin")
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="got checksum"):
        summarize(tmp_path)


TIB = 1 << 40


@pytest.mark.parametrize("what", ["chunk", "table", "index"])
def test_files_that_claim_more_than_memory(tmp_path: Path, what: str) -> None:
    """The files are as long as they say, with holes in them."""
    save(tmp_path, nn.Linear(3, 2), large=torch.zeros(8, dtype=torch.uint8))
    content, (data,), (chunks,) = read_saved(tmp_path)
    path = tmp_path / file_name(content, 0)
    if what == "chunk":
        number = sorted(content["tensors"]).index("extra.large")
        content["tensors"]["extra.large"]["shape"] = [TIB]
        larger = {"position": len(data), "shape": (TIB, 1)}
        table = table_of([chunk._replace(**larger) if chunk.tensor == number else chunk for chunk in chunks])
        os.truncate(path, len(data) + TIB)
        path.open("ab").write(table)
        content["files"] = [[len(data) + TIB, len(table), zlib.crc32(table)]]
    elif what == "table":
        os.truncate(path, len(data) + TIB)
        content["files"] = [[len(data), TIB, 0]]
    write_index(tmp_path, content)
    if what == "index":
        os.truncate(tmp_path / "checkpoint.json", TIB)
    with pytest.raises(CheckpointError, match=r"a chunk of more than 8388608 bytes|fits? into memory; load another"):
        summarize(tmp_path)
    with pytest.raises(CheckpointError, match=r"fits? into (the host's )?memory"):
        load(tmp_path, nn.Linear(3, 2))
