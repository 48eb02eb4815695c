"""Safetensors files that cannot be loaded, or not be written: an error on every rank, and nothing is changed."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardopt
from helpers import RULES
from ranks.pool import Pool, RankFailure
from ranks.runs import snapshot_of, trained
from ranks.snapshot import assert_same
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.foreign import load_safetensors, safetensors_writer, save_safetensors
from shardopt.optim import ShardedOptimizer
from test_checkpoint_safetensors import STEPS, library, read


def in_full(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Parameters, buffers and state; all ranks must call this."""
    return {**snapshot_of(model, optimizer), **dict(model.named_buffers())}


def no_metadata(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"model.x": torch.ones(3)}, path)


def newer(path: Path) -> None:
    content = path.read_bytes()
    assert b'{\\"format_version\\": 1,' in content
    path.write_bytes(content.replace(b'{\\"format_version\\": 1,', b'{\\"format_version\\": 2,', 1))


def other_model(path: Path) -> None:
    model = nn.Linear(64, 64)
    save_safetensors(path, model, shardopt.AdamW8bit(model.parameters()))


def wider_model(path: Path) -> None:
    model, _ = trained("single", 0)
    model.gate = nn.Linear(71, 1)
    save_safetensors(path, model, RULES["adamw"].make(model.parameters()))


def of(rule: str, **options: Any) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        save_safetensors(path, *trained("single", STEPS, rule, **options))

    return save


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "no such file"),
    "empty": (lambda path: path.write_bytes(b""), "expected a whole safetensors file"),
    "text": (lambda path: path.write_text("hello world"), "b'hello wor', expected one of safetensors; check the path"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "expected a whole safetensors file"),
    "cut off early": (lambda path: path.write_bytes(path.read_bytes()[:100]), "expected a whole safetensors file"),
    "no metadata": (no_metadata, "of another kind"),
    "newer": (newer, "format version 2, expected at most 1"),
    "other model": (other_model, "for model, expected"),
    "other shape": (wider_model, r"model.gate.weight of shape \(1, 71\)"),
    "other rule": (of("lion"), "expected .*exp_avg_sq_codes"),
    "other codec": (
        of("adamw", codec="dynamic8"),
        "codec='dynamic8', expected 'log8'; make .* or save with dequantize",
    ),
    "other block size": (of("adamw", block_size=64), "block_size=64"),
}


def _save_other_dtype(path: Path, dtype: torch.dtype) -> str:
    model, optimizer = trained("ddp", STEPS)
    model.module.register_buffer("odd", torch.zeros(3, dtype=dtype))
    with pytest.raises(ValueError, match=r"got model\.odd of ") as caught:
        save_safetensors(path, model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16], ids=str)
def test_a_dtype_that_the_file_cannot_hold(ranks: Pool, tmp_path: Path, dtype: torch.dtype) -> None:
    for message in ranks.run(2, _save_other_dtype, tmp_path / "run", dtype, timeout=60):
        assert f"got model.odd of {dtype}, expected one of torch.float64, " in message
        assert "register it with persistent=False, or save with shardopt.checkpoint.save" in message
    assert list(tmp_path.iterdir()) == []
    model, optimizer = trained("single", STEPS)
    model.register_buffer("odd", torch.zeros(3))
    save_safetensors(tmp_path / "run", model, optimizer)
    model.register_buffer("odd", torch.zeros(3, dtype=dtype))
    with pytest.raises(CheckpointError, match=rf"got model.odd of shape \(3,\) and F32, expected \(3,\) and {dtype};"):
        load_safetensors(tmp_path / "run", model, optimizer)


def _save_with_a_failing_writer(path: Path) -> str:
    model, optimizer = trained("fsdp", STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_writer, "header_of", lambda tensors, metadata: {}["missing"])
        with pytest.raises(CheckpointError) as caught:
            save_safetensors(path, model, optimizer)
    save_safetensors(path, model, optimizer)
    return str(caught.value)


def test_any_error_of_the_writer_is_told_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, _save_with_a_failing_writer, tmp_path / "run", timeout=60)
    assert "got KeyError while writing" in first
    assert first in second


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_nothing(tmp_path: Path, name: str) -> None:
    spoil, message = FAULTS[name]
    path = tmp_path / "run"
    model, optimizer = trained("single", 1)
    save_safetensors(path, *trained("single", STEPS))
    spoil(path)
    before, groups = in_full(model, optimizer), [dict(group) for group in optimizer.param_groups]
    with pytest.raises(CheckpointError, match=message):
        load_safetensors(path, model, optimizer)
    assert_same(in_full(model, optimizer), before)
    assert [dict(group) for group in optimizer.param_groups] == groups


def load_on_one_rank_only(path: Path) -> None:
    """Rank 1 sees no file, as where a disk is not shared."""
    model, optimizer = trained("fsdp", 1)
    rank = torch.distributed.get_rank()
    load_safetensors(path if rank == 0 else path.with_name("other"), model, optimizer)


def test_a_rank_without_the_file(ranks: Pool, tmp_path: Path) -> None:
    save_safetensors(tmp_path / "run", *trained("single", STEPS))
    with pytest.raises(RankFailure, match=r"got an error on rank 1.*no such file"):
        ranks.run(2, load_on_one_rank_only, tmp_path / "run")


def test_other_parameters(tmp_path: Path) -> None:
    _, optimizer = trained("single", 1)
    with pytest.raises(ValueError, match="expected parameters of the model only"):
        save_safetensors(tmp_path / "run", nn.Linear(64, 64), optimizer)
    assert not os.listdir(tmp_path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving and loading need none."""
    model, optimizer = trained("single", STEPS)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    save_safetensors(tmp_path / "run", model, optimizer)
    other_model, other = trained("single", 1)
    load_safetensors(tmp_path / "run", other_model, other)
    assert_same(snapshot_of(other_model, other), snapshot_of(model, optimizer))


def test_files_of_the_library(tmp_path: Path) -> None:
    """A file that the library wrote, with tensors in another order and at other offsets, loads."""
    from safetensors.torch import save_file

    model, optimizer = trained("single", STEPS)
    save_safetensors(tmp_path / "run", model, optimizer)
    with library.safe_open(tmp_path / "run", framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in reversed(file.keys())}, file.metadata()
    save_file(tensors, tmp_path / "again", metadata)
    assert (tmp_path / "again").read_bytes() != (tmp_path / "run").read_bytes()
    other_model, other = trained("single", 1)
    load_safetensors(tmp_path / "again", other_model, other)
    assert_same(snapshot_of(other_model, other), snapshot_of(model, optimizer))


def test_names_outlast_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is on the disk before it gets its name, and the folder afterwards."""
    model, optimizer = trained("single", 1)
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def syncing(file: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        fsync(file)

    def replacing(old: Path, new: Path) -> None:
        done.append("name")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    save_safetensors(tmp_path / "run", model, optimizer)
    assert done == ["file", "name", "folder"]


def failing_reads(good: int) -> Callable[..., int]:
    """``os.preadv`` that fails after so many reads."""
    left = iter(range(good))

    def preadv(*args: Any) -> int:
        if next(left, None) is None:
            raise OSError(errno.EIO, "Input/output error")
        return PREADV(*args)

    return preadv


PREADV = os.preadv


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_read_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dequantize: bool) -> None:
    """Whichever it is."""
    path = tmp_path / "run"
    save_safetensors(path, *trained("single", STEPS), dequantize=dequantize)
    reads = 2 + len(read(path)[0])
    model, optimizer = trained("single", 1)
    before, groups = in_full(model, optimizer), [dict(group) for group in optimizer.param_groups]
    for good in range(reads):
        monkeypatch.setattr(os, "preadv", failing_reads(good))
        with pytest.raises(CheckpointError, match=f"^{path}: cannot be read: Input/output error; save it again$"):
            load_safetensors(path, model, optimizer)
        assert_same(in_full(model, optimizer), before)
        assert [dict(group) for group in optimizer.param_groups] == groups
    monkeypatch.setattr(os, "preadv", failing_reads(reads))
    load_safetensors(path, model, optimizer)


def load_what_rank_1_cannot_read(way: str, path: Path, good: int) -> str:
    model, optimizer = trained(way, 1)
    before = in_full(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            patch.setattr(os, "preadv", failing_reads(good))
        with pytest.raises(CheckpointError) as raised:
            load_safetensors(path, model, optimizer)
    assert_same(in_full(model, optimizer), before)
    return str(raised.value)


@pytest.mark.parametrize("good", [0, 5, 30])
def test_a_read_that_fails_on_one_rank(ranks: Pool, tmp_path: Path, good: int) -> None:
    """Whole rows are coded by all ranks together: none may wait for the other."""
    path = tmp_path / "run"
    save_safetensors(path, *trained("single", STEPS), dequantize=True)
    messages = ranks.run(2, load_what_rank_1_cannot_read, "fsdp columns", path, good)
    assert messages[1] == f"{path}: cannot be read: Input/output error; save it again"
    assert messages[0].endswith(messages[1])
