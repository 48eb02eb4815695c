"""Mistakes in the arguments of save and load, and the remedies in the messages."""

from pathlib import Path

import pytest
import torch
from torch import nn

import shardopt
from shardopt.checkpoint import CheckpointError


def test_a_scheduler_itself_is_refused_with_its_remedy(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD(model.parameters()), 10)
    with pytest.raises(TypeError, match=r"CosineAnnealingLR.*scheduler\.state_dict\(\)"):
        shardopt.checkpoint.save(tmp_path / "a", model, scheduler=scheduler)
    shardopt.checkpoint.save(tmp_path / "a", model, scheduler=scheduler.state_dict())
    assert shardopt.checkpoint.load(tmp_path / "a", model).extra["scheduler"]["T_max"] == 10


def test_keys_that_json_would_change_are_refused(tmp_path: Path) -> None:
    """MultiStepLR looks its milestones up by number: as text it would never find them."""
    model = nn.Linear(8, 8)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters(), lr=1.0), [30, 60])
    for _ in range(25):
        scheduler.optimizer.step()
        scheduler.step()
    state = scheduler.state_dict()
    with pytest.raises(TypeError, match=r"extra\.scheduler\.milestones: got the key 30, expected text"):
        shardopt.checkpoint.save(tmp_path, model, scheduler=state)
    with pytest.raises(TypeError, match=r"extra\.nested: got the key 1,"):
        shardopt.checkpoint.save(tmp_path, model, nested=[{"a": 0}, ({1: 2},)])
    assert not list(tmp_path.glob("*.json"))
    del state["milestones"]
    shardopt.checkpoint.save(tmp_path, model, scheduler=state)
    other = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters(), lr=1.0), [30, 60])
    other.load_state_dict(shardopt.checkpoint.load(tmp_path, model).extra["scheduler"])
    for _ in range(5):
        other.optimizer.step()
        other.step()
    assert (other.last_epoch, other.get_last_lr()) == (30, [0.1])


@pytest.mark.parametrize("kind", ["lists", "dicts", "a circle"])
def test_endless_extras_are_refused(tmp_path: Path, kind: str) -> None:
    """And those of a hundred levels, which every parser reads, are not."""
    model = nn.Linear(8, 8)
    shardopt.checkpoint.save(tmp_path, model, deep=_nested(kind, 100))
    assert shardopt.checkpoint.load(tmp_path, model).extra == {"deep": _nested(kind, 100)}
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(
        TypeError, match=r"extra\.deep.*: got lists and dicts nested more than 100 deep, or in a circle"
    ):
        shardopt.checkpoint.save(tmp_path, model, deep=circle if kind == "a circle" else _nested(kind, 2000))
    assert shardopt.checkpoint.load(tmp_path, model).extra == {"deep": _nested(kind, 100)}


def _nested(kind: str, depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = {"a": value} if kind == "dicts" else [value]
    return value


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
    model = nn.Linear(8, 8)
    with pytest.raises(TypeError, match=r"got Linear for a path.*save\(path, model, optimizer\)"):
        shardopt.checkpoint.save(model, shardopt.AdamW8bit(model.parameters()), tmp_path)  # type: ignore[arg-type]


def test_another_optimizer_is_told_the_model_alone(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    optimizer = shardopt.AdamW8bit(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    refused = (
        r"saved by AdamW8bit, expected .* of Lion8bit; load it into AdamW8bit, or the model alone: load\(path, model\)"
    )
    with pytest.raises(CheckpointError, match=refused):
        shardopt.checkpoint.load(tmp_path, model, shardopt.Lion8bit(model.parameters()))
    shardopt.checkpoint.load(tmp_path, model)


def test_other_folders_are_told_the_way(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    (tmp_path / "run" / "step-1").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"step-1000 in place of the folder around it"):
        shardopt.checkpoint.load(tmp_path / "run", model)
    (tmp_path / "run" / ".metadata").touch()
    with pytest.raises(CheckpointError, match=r"a folder of torch\.distributed\.checkpoint.*import_state"):
        shardopt.checkpoint.load(tmp_path / "run", model)
    (tmp_path / "file.pt").touch()
    with pytest.raises(CheckpointError, match=r"file\.pt: there is no such folder.*torch\.load"):
        shardopt.checkpoint.load(tmp_path / "file.pt", model)


def test_a_whole_file_of_torch_save_is_told_the_entry() -> None:
    model = nn.Linear(64, 64)
    ours = shardopt.AdamW8bit(model.parameters())
    saved = {"model": model.state_dict(), "optimizer": torch.optim.AdamW(model.parameters()).state_dict()}
    with pytest.raises(ValueError, match="pass its entry 'optimizer'"):
        shardopt.checkpoint.import_state(ours, saved)
