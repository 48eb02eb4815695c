"""Folders of torch.distributed.checkpoint: as source and target, against torch's own load and save."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardopt
from convert_runs import PIECE, Evil, Net, assert_loads, make, step, trained
from ranks.pool import Pool
from ranks.runs import snapshot_of
from ranks.snapshot import assert_same
from safetensors_files import content
from shardopt import checkpoint
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.convert import convert
from versions import adamw_names_itself


def save(path: Path, model: Any, optimizer: Any, **extra: Any) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer, **extra}, checkpoint_id=path)


def load(path: Path, model: Any, optimizer: Any) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


@pytest.mark.parametrize("codec", ["log8", "log4", "fp32"])
def test_own_optimizer(tmp_path: Path, codec: str) -> None:
    run = trained(codec=codec)
    save(tmp_path / "dcp", *run, epoch=3, noise=torch.arange(4.0))
    assert convert(tmp_path / "dcp", tmp_path / "portable", piece_numel=PIECE).source == "dcp"
    assert_loads(tmp_path / "portable", run, codec=codec)
    extra = checkpoint.load(tmp_path / "portable", *make(codec=codec)).extra
    assert extra["epoch"] == 3
    assert torch.equal(extra["noise"], torch.arange(4.0))
    convert(tmp_path / "portable", tmp_path / "back", "dcp", piece_numel=PIECE)
    other = make(codec=codec)
    load(tmp_path / "back", *other)
    assert_same(snapshot_of(*other), snapshot_of(*run))


def test_a_scheduler_comes_along_both_ways(tmp_path: Path) -> None:
    model, optimizer = trained(codec="log8")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scheduler.step()
    noise = torch.arange(4.0)
    save(
        tmp_path / "dcp", model, optimizer, scheduler=scheduler.state_dict(), deep={"a": {"b": [1, 2]}, "noise": noise}
    )
    report = convert(tmp_path / "dcp", tmp_path / "portable", piece_numel=PIECE)
    assert report.left_out == ["deep.noise"]
    extra = checkpoint.load(tmp_path / "portable", *make(codec="log8")).extra
    assert extra == {"scheduler": scheduler.state_dict(), "deep": {"a": {"b": [1, 2]}}}
    convert(tmp_path / "portable", tmp_path / "back", "dcp", piece_numel=PIECE)
    other = torch.optim.lr_scheduler.CosineAnnealingLR(make(codec="log8")[1], 7)
    template = {"scheduler": other.state_dict()}
    dcp.load(template, checkpoint_id=tmp_path / "back")
    assert template["scheduler"] == scheduler.state_dict()


def test_values_that_other_formats_have_no_place_for_are_told(tmp_path: Path) -> None:
    """A module's extra state, and two values of one name once dicts are flattened."""
    model, optimizer = trained(codec="log8")
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save(
        {"model": {**of_model, "_extra_state": 7}, "optimizer": of_optimizer, "epoch": 3}, checkpoint_id=tmp_path / "a"
    )
    report = convert(tmp_path / "a", tmp_path / "file.pt", "torch", piece_numel=PIECE)
    assert report.left_out == ["model._extra_state"]
    content = torch.load(tmp_path / "file.pt", weights_only=True)
    assert content["epoch"] == 3
    assert_same(content["model"], dict(model.state_dict()))
    checkpoint.save(tmp_path / "b", model, optimizer, a={"b": 1}, **{"a.b": 2})
    report = convert(tmp_path / "b", tmp_path / "dcp", "dcp", piece_numel=PIECE)
    assert report.left_out == ["a second value that would be called a.b"]


def test_torchs_optimizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    theirs = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.3)
    step(model, theirs)
    save(tmp_path / "dcp", model, theirs)
    name = None if adamw_names_itself else "AdamW"
    convert(tmp_path / "dcp", tmp_path / "portable", codec="log8", piece_numel=PIECE, optimizer=name)
    ours = []
    for _ in range(2):
        other = Net()
        ours.append((other, shardopt.AdamW8bit([p for p in other.parameters() if p.requires_grad])))
    ours[0][0].load_state_dict(model.state_dict())
    ours[0][1].load_state_dict(theirs.state_dict())
    checkpoint.load(tmp_path / "portable", *ours[1])
    assert_same(snapshot_of(*ours[0]), snapshot_of(*ours[1]))
    assert ours[1][1].param_groups[0]["weight_decay"] == 0.3


def _save_sharded(path: Path, codec: str) -> None:
    from ranks.runs import trained as trained_on_ranks

    model, optimizer = trained_on_ranks("fsdp", 2, "adamw", codec=codec)
    save(path / "dcp", model, optimizer)
    checkpoint.save(path / "saved", model, optimizer)


def test_sharded(ranks: Pool, tmp_path: Path) -> None:
    """Chunks of several files: as the portable checkpoint of the same run."""
    ranks.run(2, _save_sharded, tmp_path, "log8")
    for name in ("dcp", "saved"):
        convert(tmp_path / name, tmp_path / f"{name}.safetensors", "safetensors", piece_numel=PIECE, optimizer="AdamW")
    assert_same(*(content(tmp_path / f"{name}.safetensors")[0] for name in ("dcp", "saved")))


def test_channels_last(tmp_path: Path) -> None:
    model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "portable", piece_numel=PIECE)
    other = torch.nn.Conv2d(3, 8, 3)
    checkpoint.load(tmp_path / "portable", other)
    assert torch.equal(other.weight, model.weight)


def _change(path: Path, change: Any) -> None:
    found = pickle.loads((path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(pickle.dumps(change(found) or found))


def _replace(found: Any, **values: Any) -> None:
    for index, info in found.storage_data.items():
        if index.fqn == "model.uneven":
            for key, value in values.items():
                setattr(info, key, value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: Evil(), "io.open|builtins.open"),
        (lambda m: m.planner_data.update(x=Evil()), "io.open|builtins.open"),
        (lambda m: {"not": "metadata"}, "another kind"),
        (lambda m: _replace(m, relative_path="../secret"), "expected a file in the folder"),
        (lambda m: _replace(m, relative_path="missing.distcp"), "cannot be opened"),
        (lambda m: _replace(m, transform_descriptors=["zstd"]), "without extensions"),
        (lambda m: _replace(m, offset=-1), "sizes"),
        (lambda m: _replace(m, offset=3), "got bool at byte 3, expected a dense tensor"),
        (lambda m: _replace(m, offset=1 << 40), "expected what DCP writes"),
        (lambda m: m.state_dict_metadata["model.uneven"].chunks.clear(), "do not fill model.uneven"),
        (lambda m: setattr(m.state_dict_metadata["model.uneven"], "size", torch.Size([1 << 50, 301])), "do not fill"),
        (
            lambda m: setattr(m.state_dict_metadata["model.uneven"].properties, "dtype", torch.int32),
            "got torch.float32",
        ),
        (lambda m: m.planner_data.pop("optimizer.param_groups.0.params") and None, "got no params"),
        (lambda m: m.planner_data.update({"optimizer.state.bias.step": ("optimizer", "x")}), "flatten_optimizer"),
    ],
)
def test_damaged_and_hostile_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, match: str) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "dcp", *trained())
    _change(tmp_path / "dcp", change)
    with pytest.raises(CheckpointError, match=match):
        convert(tmp_path / "dcp", tmp_path / "portable", piece_numel=PIECE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp"]


def test_a_hostile_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "dcp", *trained())
    torch.save(Evil(), tmp_path / "dcp" / "evil.distcp")
    length = (tmp_path / "dcp" / "evil.distcp").stat().st_size
    _change(tmp_path / "dcp", lambda m: _replace(m, relative_path="evil.distcp", offset=0, length=length))
    with pytest.raises(CheckpointError, match="expected what DCP writes"):
        convert(tmp_path / "dcp", tmp_path / "portable", piece_numel=PIECE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp"]
