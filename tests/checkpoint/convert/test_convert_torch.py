"""Files of torch.save: into shardopt's formats and back, against import_state and the optimizers themselves."""

from __future__ import annotations

import builtins
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardopt
from convert_runs import PIECE, Evil, Net, assert_loads, make, step, trained
from ranks.runs import snapshot_of
from ranks.snapshot import assert_same
from shardopt import checkpoint
from shardopt.checkpoint import CheckpointError, import_state
from shardopt.checkpoint.convert import convert, torch_file
from versions import adamw_names_itself


def of_torch(kind: str, named: bool = True, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    params: Any = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return model, getattr(torch.optim, kind)(params if named else [p for _, p in params], **options)


def saved(path: Path, kind: str, named: bool = True, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    model, optimizer = of_torch(kind, named, **options)
    step(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "options", "own"),
    [
        ("AdamW", {"weight_decay": 0.3, "betas": (0.8, 0.9)}, {"codec": "log8"}),
        ("AdamW", {"amsgrad": True}, {"codec": "fp32"}),
        ("Adam", {"lr": 0.01, "weight_decay": 0.1}, {"codec": "companded8", "block_size": 64}),
        ("SGD", {"momentum": 0.9, "nesterov": True}, {"codec": "bf16"}),
        ("SGD", {}, {}),
        ("RMSprop", {"centered": True}, {"codec": "log8"}),
        ("NAdam", {}, {"codec": "log8"}),
        ("Adagrad", {"lr_decay": 0.1}, {}),
    ],
)
def test_as_load_state_dict(tmp_path: Path, kind: str, options: dict[str, Any], own: dict[str, Any]) -> None:
    model, theirs = saved(tmp_path / "run.pt", kind, **options)
    found = convert(tmp_path / "run.pt", tmp_path / "converted", **own, piece_numel=PIECE, optimizer=NAMES.get(kind))
    assert found.source == "torch"
    ours = []
    for _ in range(2):
        other = Net()
        params = [p for p in other.parameters() if p.requires_grad]
        ours.append((other, getattr(shardopt, kind)(params, **{"codec": "fp32", **own, **options})))
    ours[0][0].load_state_dict(model.state_dict())
    ours[0][1].load_state_dict(theirs.state_dict())
    assert checkpoint.load(tmp_path / "converted", *ours[1]).extra == {"epoch": 3}
    assert_same(snapshot_of(*ours[0]), snapshot_of(*ours[1]))
    for key, value in ours[1][1].param_groups[0].items():
        assert key == "params" or ours[0][1].param_groups[0][key] == value
    if kind in ("AdamW", "Adam"):
        import_state(ours[0][1], theirs.state_dict())
        assert_same(snapshot_of(*ours[0]), snapshot_of(*ours[1]))


#: Adagrad and SGD without momentum have no moments from which their names follow.
NAMES = {"SGD": "SGD", **({} if adamw_names_itself else {"Adam": "Adam", "AdamW": "AdamW"})}


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "SGD"])
def test_torch_goes_on_from_the_target(tmp_path: Path, kind: str) -> None:
    """The file has the bits of state_dict(dequantize=True), and torch.optim's optimizer loads it."""
    options = {"momentum": 0.9} if kind == "SGD" else {}
    model, optimizer = trained(kind, codec="log8", **options)
    checkpoint.save(tmp_path / "saved", model, optimizer, epoch=3, noise=torch.arange(4.0))
    convert(tmp_path / "saved", tmp_path / "run.pt", "torch", piece_numel=PIECE)
    found = torch.load(tmp_path / "run.pt", weights_only=True)
    assert found["epoch"] == 3
    assert torch.equal(found["noise"], torch.arange(4.0))
    assert_same(dict(sorted(found["model"].items())), dict(sorted(model.state_dict().items())))
    expected = optimizer.state_dict(dequantize=True)
    assert found["optimizer"]["state"].keys() == expected["state"].keys()
    for index, entries in expected["state"].items():
        assert_same(found["optimizer"]["state"][index], entries)
    for group, other in zip(found["optimizer"]["param_groups"], expected["param_groups"], strict=True):
        assert group.items() >= other.items()
    other_model = Net()
    groups = [
        {"params": [other_model.get_parameter(n) for n in names]} for names in (("uneven", "bias"), ("long", "scalar"))
    ]
    theirs = getattr(torch.optim, kind)(groups, **options)
    theirs.load_state_dict(found["optimizer"])
    other_model.load_state_dict(found["model"])
    step(other_model, theirs, 1)


def test_there_and_back(tmp_path: Path) -> None:
    run = trained(codec="fp32")
    checkpoint.save(tmp_path / "saved", *run)
    convert(tmp_path / "saved", tmp_path / "run.pt", "torch", piece_numel=PIECE)
    mapped = torch.load(tmp_path / "run.pt", weights_only=True, mmap=True)
    assert all(value.data_ptr() % 64 == 0 for value in mapped["model"].values())
    convert(tmp_path / "run.pt", tmp_path / "back", piece_numel=PIECE, optimizer="AdamW")
    assert_loads(tmp_path / "back", run, codec="fp32")


@pytest.mark.parametrize("after", [0, 1, 7, 30])
@pytest.mark.parametrize(
    ("cause", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_write_of_the_archive_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: BaseException, raised: type[BaseException], after: int
) -> None:
    """Of which PyTorch tells that the archive is not complete."""
    checkpoint.save(tmp_path / "saved", *trained(codec="fp32"))
    left = iter(range(after))

    class Failing:
        def __init__(self, *args: str) -> None:
            self.file = builtins.open(*args)  # noqa: SIM115  closed by __exit__

        def __enter__(self) -> Failing:
            return self

        def __exit__(self, *args: object) -> None:
            self.file.close()

        def write(self, data: Any) -> int:
            if next(left, None) is None:
                raise cause
            return self.file.write(data)

    monkeypatch.setattr(torch_file, "open", Failing, raising=False)
    with pytest.raises(raised, match="target: got .*No space left on device" if raised is CheckpointError else None):
        convert(tmp_path / "saved", tmp_path / "target", "torch", piece_numel=PIECE)
    assert os.listdir(tmp_path) == ["saved"]


def test_tensors_without_elements(tmp_path: Path) -> None:
    """A model of them alone, and a buffer of a dtype that has no storage class."""
    model = torch.nn.Linear(3, 0, bias=False)
    model.register_buffer("odd", torch.zeros(0, dtype=torch.float8_e4m3fn))
    checkpoint.save(tmp_path / "saved", model)
    convert(tmp_path / "saved", tmp_path / "run.pt", "torch")
    found = torch.load(tmp_path / "run.pt", weights_only=True)["model"]
    assert {key: (value.shape, value.dtype) for key, value in found.items()} == {
        key: (value.shape, value.dtype) for key, value in model.state_dict().items()
    }


def test_own_state_dicts_keep_their_codes(tmp_path: Path) -> None:
    model, optimizer = make()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [{**group, "params": [(names[id(p)], p) for p in group["params"]]} for group in optimizer.param_groups]
    named = shardopt.AdamW(groups, codec="log8")
    step(model, named)
    torch.save({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path / "run.pt")
    convert(tmp_path / "run.pt", tmp_path / "converted", piece_numel=PIECE)
    other = make()
    assert checkpoint.load(tmp_path / "converted", *other).converted == {}
    assert_same(snapshot_of(*other), snapshot_of(model, named))


def test_names_by_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "run.pt")
    convert(tmp_path / "run.pt", tmp_path / "converted", piece_numel=PIECE, optimizer=NAMES.get("AdamW"))
    other = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
    ours = shardopt.AdamW(other.parameters(), codec="fp32")
    checkpoint.load(tmp_path / "converted", other, ours)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c["model"].update(more=torch.zeros(3)), "4 parameters without param_names .*named_parameters"),
        (lambda c: c["optimizer"]["param_groups"].append({**c["optimizer"]["param_groups"][0], "params": []}), "names"),
        (lambda c: c.pop("model"), 'got optimizer, expected {"model"'),
        (lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.zeros(2, 2)), "named_parameters"),
        (lambda c: c["optimizer"]["state"][0]["exp_avg_sq"].fill_(-1), "0.weight: got exp_avg_sq .* below zero"),
        (lambda c: c["optimizer"]["state"][0].update(step=torch.tensor(-1.0)), "got step as -1.0"),
        (
            lambda c: c["optimizer"]["state"][0].pop("exp_avg"),
            "got state with exp_avg_sq, expected exp_avg, exp_avg_sq",
        ),
        (lambda c: c["optimizer"]["state"].update({9: {}}), "got state of 9 in no param group"),
        (lambda c: c["optimizer"]["param_groups"][0].update(lr=-1.0), "lr: got -1.0"),
        (lambda c: c["optimizer"].pop("state"), "expected state and param_groups"),
        (lambda c: c["model"].update({"0.bias": torch.zeros(1).expand(10**12)}), "dense tensors"),
        (lambda c: [s.pop("exp_avg_sq") for s in c["optimizer"]["state"].values()], "got nothing|--optimizer"),
        (lambda c: c["optimizer"]["param_groups"][0].pop("decoupled_weight_decay", None), "--optimizer"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: Any, match: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    content = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    change(content)
    torch.save(content, tmp_path / "run.pt")
    name = None if "--optimizer" in match else NAMES.get("AdamW")
    with pytest.raises(CheckpointError, match=match):
        convert(tmp_path / "run.pt", tmp_path / "converted", piece_numel=PIECE, optimizer=name)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("cut", [None, 10, 2000, -100])
def test_damaged_and_hostile_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int | None) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "run.pt", "AdamW")
    if cut is None:
        torch.save({"model": {}, "optimizer": Evil()}, tmp_path / "run.pt")
    else:
        content = (tmp_path / "run.pt").read_bytes()
        (tmp_path / "run.pt").write_bytes(content[:cut])
    with pytest.raises(CheckpointError, match=r"expected one of torch\.save"):
        convert(tmp_path / "run.pt", tmp_path / "converted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.pt"]
