"""The command ``shardopt inspect``: sizes and codecs of a portable checkpoint, and its damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardopt
from attack.index_file import read_index, write_index
from checkpoint_folder import flip, the_data_file
from shardopt.__main__ import main
from shardopt.checkpoint import save


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = nn.Linear(128, 64, dtype=torch.bfloat16)
    model.register_buffer("seen", torch.tensor([3.0, 5.0]))
    optimizer = shardopt.AdamW4bit(model.parameters(), master_weight_bits=24)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    save(tmp_path / "saved", model, optimizer, epoch=3, best=float("inf"))
    return tmp_path / "saved"


def test_tables(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved)]) == 0
    text = capsys.readouterr().out
    cells = [line.split() for line in text.splitlines()]
    numel, small = 64 * 128, 64
    for kind, nbytes in {
        "weights": 2 * (numel + small) + 8,
        "codes": numel,
        "scales": 12 * 64,
        "moments": 4 + 4 + 2 * 4 * small,  # step, and the moments of the bias
    }.items():
        assert [kind, f"{nbytes:,}"] in [line[:2] for line in cells]
    assert ["master", "low", "bits", f"{numel + small:,}"] in [line[:4] for line in cells]
    assert ["weight", "64", "x", "128", "bfloat16", "log4", "2.094"] in cells
    assert ["bias", "64", "bfloat16", "fp32"] in [line[:4] for line in cells]
    assert ["seen", "2", "float32"] in cells
    for needed in ("saved by AdamW4bit", "extra: epoch, best", "No damage"):
        assert needed in text
    assert main(["inspect", str(saved), "--index-only"]) == 0
    assert "The data were not read." in capsys.readouterr().out


def test_without_an_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, nn.Linear(3, 2), small=torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn))
    assert main(["inspect", str(tmp_path)]) == 0
    assert "saved by no optimizer; 2 parameters and buffers, 8 elements" in capsys.readouterr().out
    content = read_index(tmp_path)
    content["header"]["param_groups"] = [{"parameters": 3, "options": []}]
    write_index(tmp_path, content)
    assert main(["inspect", str(tmp_path)]) == 1
    assert "a param group without names and options" in capsys.readouterr().err


def test_damage_is_an_error(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(the_data_file(saved), 100)
    assert main(["inspect", str(saved)]) == 1
    assert "checksum" in capsys.readouterr().err
    assert main(["inspect", str(the_data_file(saved))]) == 1
    assert "got a file, expected a folder" in capsys.readouterr().err
    assert main(["inspect", str(saved / "nothing")]) == 1
    assert "there is no such folder" in capsys.readouterr().err
