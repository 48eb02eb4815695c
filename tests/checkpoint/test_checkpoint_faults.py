"""Damaged and foreign folders, options and state that no step could go on from: what a load says of each fault.

Nothing is changed. The folder ``attack`` has many more, at random.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from attack.index_file import INDEX, read_index, read_saved, with_checksum, write_index
from checkpoint_folder import flip, the_data_file
from checkpoint_runs import assert_refuses, step_with, trained
from shardopt.checkpoint import CheckpointError

NAN, INF = math.nan, math.inf
Header = dict[str, Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The folder of a checkpoint."""
    shardopt.checkpoint.save(tmp_path / "checkpoint", *trained())
    return tmp_path / "checkpoint"


def _changed(path: Path, **changes: Any) -> None:
    write_index(path, {**read_index(path), **changes})


def _write(path: Path, content: bytes) -> None:
    (path / INDEX).write_bytes(content)


TIB = 1 << 40
NOT_OURS = "got content that no version of shardopt writes"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda path: path.rename(path.with_name("moved")), r"there is no such folder.*torch\.load"),
    "empty folder": (lambda path: [x.unlink() for x in path.iterdir()], "there is no such folder, or nothing in it"),
    "the folder around it": (
        lambda path: [x.rename(path / "step-1000") for x in path.iterdir()],
        f"there is no {INDEX} in it.*step-1000 in place of the folder around it",
    ),
    "another's folder": (
        lambda path: ([entry.unlink() for entry in path.iterdir()], (path / ".metadata").touch()),
        r"a folder of torch\.distributed\.checkpoint.*import_state",
    ),
    "never finished": (lambda path: (path / INDEX).unlink(), "saving it was never finished"),
    "another kind": (lambda path: _write(path, b'{"weights": []}\n'), "a file of another kind"),
    "no JSON": (lambda path: _write(path, with_checksum(b"\x00")), f"{NOT_OURS}: JSONDecodeError"),
    "newer": (lambda path: _changed(path, format_version=3), "got format version 3, expected 2; load it with"),
    "a long index": (lambda path: os.truncate(path / INDEX, TIB), "got an index that does not fit into memory"),
    "no tensors": (lambda path: _changed(path, tensors={}), r"another model: the checkpoint does not have model\.bias"),
    "longer data": (lambda path: the_data_file(path).open("ab").write(b"x"), r"got \d+ bytes, expected \d+"),
    "an index flipped": (lambda path: flip(path / INDEX, 70), "damaged after it was saved"),
    "data flipped": (lambda path: flip(the_data_file(path), 0), r"got checksum \w+ of the \d+ bytes at 0, expected"),
    "a link": (
        lambda path: ((path / INDEX).rename(path / "index"), (path / INDEX).symlink_to(path / "index")),
        "cannot be .*got a symbolic link, expected a regular file",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(path: Path, fault: str) -> None:
    make, message = FAULTS[fault]
    make(path)
    assert_refuses(path, message)


def test_a_chunk_that_is_too_long(tmp_path: Path) -> None:
    """All its checksums are right, but a load has less memory for one."""
    shardopt.checkpoint.save(tmp_path, nn.Identity(), zeros=torch.zeros(9 << 20, dtype=torch.uint8))
    saved = read_saved(tmp_path)
    ((first, _),) = saved.tables
    saved.tables[0][1:] = []
    saved.tables[0][0] = first._replace(shape=(9 << 20,), crc32=zlib.crc32(bytes(9 << 20)))
    saved.write(tmp_path)
    with pytest.raises(CheckpointError, match="a chunk of more than 8388608 bytes"):
        shardopt.checkpoint.load(tmp_path, nn.Identity())


# --- what the header says


def rewrite(folder: Path, change: Callable[[Header], object]) -> None:
    """Changes the header of a checkpoint, and its checksum with it."""
    content = read_index(folder)
    change(content["header"])
    write_index(folder, content)


def option(**options: Any) -> Callable[[Header], object]:
    return lambda header: header["param_groups"][0]["options"].update(options)


def test_a_header_that_was_only_rewritten_loads(tmp_path: Path) -> None:
    shardopt.checkpoint.save(tmp_path, *trained())
    rewrite(tmp_path, option(lr=0.5, params=[1], param_names=["a"]))
    other, fresh = trained(seed=7)
    params = fresh.param_groups[0]["params"]
    shardopt.checkpoint.load(tmp_path, other, fresh)
    assert fresh.param_groups[0]["lr"] == 0.5
    assert fresh.param_groups[0]["params"] is params
    assert "param_names" not in fresh.param_groups[0]


def test_a_learning_rate_on_a_tensor_keeps_its_place(tmp_path: Path) -> None:
    """And takes no other value than a number; not even one on a device, which is not read."""
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    other, fresh = trained(seed=7)
    lr = fresh.param_groups[0]["lr"] = torch.tensor(0.5)
    shardopt.checkpoint.load(tmp_path, other, fresh)
    assert fresh.param_groups[0]["lr"] is lr
    assert float(lr) == 0.25
    for wrong in ("abc", NAN, None):
        rewrite(tmp_path, option(lr=wrong))
        for own in (lr, torch.tensor(0.5, device="meta")):
            fresh.param_groups[0]["lr"] = own
            with pytest.raises(CheckpointError, match="param group 0: lr: got"):
                shardopt.checkpoint.load(tmp_path, other, fresh)
            assert fresh.param_groups[0]["lr"] is own
    assert float(lr) == 0.25


def test_stochastic_rounding_is_not_taken_over_with_other_master_weights(tmp_path: Path) -> None:
    """The two exclude each other: the load went well, and the next step failed."""
    shardopt.checkpoint.save(tmp_path, *trained(stochastic_rounding=True))
    other, fresh = trained(seed=7, master_weight_bits=24)
    shardopt.checkpoint.load(tmp_path, other, fresh, convert=True)
    assert (fresh.param_groups[0]["stochastic_rounding"], fresh.param_groups[0]["master_weight_bits"]) == (False, 24)
    step_with(other, fresh, 9)


# --- state


DAMAGE = {
    "scales": ("weight", "exp_avg_scales", NAN),
    "scales of the second moment": ("weight", "exp_avg_sq_scales", -1.0),
    "a moment": ("bias", "exp_avg", INF),
    "the second moment": ("bias", "exp_avg_sq", -1.0),
    "no number of steps": ("bias", "step", NAN),
    "steps below zero": ("weight", "step", -5.0),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_states(tmp_path: Path, name: str) -> None:
    """Also where they are converted. The model loads by itself."""
    model, optimizer = trained()
    parameter, entry, value = DAMAGE[name]
    optimizer.state[model.get_parameter(parameter)][entry].view(-1)[0] = value
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    message = re.escape(f"{tmp_path}: {parameter}: got ")
    assert_refuses(tmp_path, message)
    assert_refuses(tmp_path, message, convert=True, codec="dynamic8", master_weight_bits=24)
    shardopt.checkpoint.load(tmp_path, trained().model)


def test_weights_may_be_infinite(tmp_path: Path) -> None:
    model, optimizer = trained()
    with torch.no_grad():
        model.weight[0, :2] = torch.tensor([NAN, INF])
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    other, fresh = trained(seed=7)
    shardopt.checkpoint.load(tmp_path, other, fresh)
    assert torch.equal(other.weight.isfinite(), model.weight.isfinite())
    assert torch.equal(other.bias, model.bias)
