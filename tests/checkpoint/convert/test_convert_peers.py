"""Other packages' state as source: the bits of import_state."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardopt
from convert_runs import PIECE
from foreign_states import (
    SHAPES,
    bitsandbytes_ademamix,
    bitsandbytes_squares,
    bitsandbytes_state,
    flashoptim_state,
    made_up,
    save_torchao,
    torchao_state,
)
from ranks.runs import snapshot_of
from ranks.snapshot import assert_same
from shardopt import checkpoint
from shardopt.checkpoint import CheckpointError, import_state
from shardopt.checkpoint.convert import convert


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for index, shape in enumerate(SHAPES):
            setattr(self, f"p{index}", nn.Parameter(torch.randn(shape)))


ADAM = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
LION = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 0, "weight_decay": 0.1}


def saved(path: Path, make: Any, hyper: dict[str, Any]) -> dict[str, Any]:
    states = {index: make(made_up(shape, index))[0] for index, shape in enumerate(SHAPES)}
    state_dict = {"state": states, "param_groups": [{**hyper, "params": list(range(len(SHAPES)))}]}
    torch.save({"model": Net().state_dict(), "optimizer": state_dict}, path)
    return state_dict


@pytest.mark.parametrize("own", [{}, {"codec": "log8", "block_size": 128}, {"codec": "fp32"}])
@pytest.mark.parametrize(
    ("kind", "make", "hyper"),
    [
        ("AdamW", bitsandbytes_state, ADAM),
        ("AdamW", lambda x: bitsandbytes_state(x, size=2048), ADAM),
        ("Lion", lambda x: bitsandbytes_state(x, count=1), LION),
        ("SGD", lambda x: bitsandbytes_state(x, count=1), {**LION, "betas": (0.9, 0.0)}),
        ("RMSprop", bitsandbytes_squares, {**ADAM, "betas": (0.99, 0.0)}),
        ("AdEMAMix", bitsandbytes_ademamix, {**ADAM, "betas": (0.9, 0.99, 0.999), "alpha": 5.0}),
    ],
)
def test_bitsandbytes(tmp_path: Path, kind: str, make: Any, hyper: dict[str, Any], own: dict[str, Any]) -> None:
    state_dict = saved(tmp_path / "run.pt", make, hyper)
    found = convert(tmp_path / "run.pt", tmp_path / "converted", **own, piece_numel=PIECE)
    size = 2048 if state_dict["state"][0]["__bnb_optimizer_quant_state__"]["absmax1"].numel() < 16 else 256
    if own.get("codec") == "log8":
        anew = found.states.values()
        assert set(anew) == {f"dynamic8 of bitsandbytes in blocks of {size} state for log8 in blocks of 128"}
    options = own or {"codec": "dynamic8", "block_size": size}
    start = {"momentum": 0.9} if kind == "SGD" else {}
    assert_as_import_state(tmp_path / "converted", kind, state_dict, **options, **start)


def saved_torchao(path: Path, group: dict[str, Any]) -> dict[str, Any]:
    """Saves a model and state of torchao's form; returns the state dict with what has the subclass's attributes."""
    states = {index: torchao_state(made_up(shape, index))[0] for index, shape in enumerate(SHAPES)}
    groups = [{**group, "params": list(range(len(SHAPES)))}]
    save_torchao({"model": Net().state_dict(), "optimizer": {"state": states, "param_groups": groups}}, path)
    return {"state": states, "param_groups": groups}


def assert_as_import_state(path: Path, kind: str, state_dict: dict[str, Any], **options: Any) -> None:
    """Compares a converted checkpoint, when loaded, with an import of the state dict that was converted."""
    runs = []
    for _ in range(2):
        model = Net()
        runs.append((model, getattr(shardopt, kind)(model.parameters(), **options)))
    import_state(runs[0][1], state_dict)
    checkpoint.load(path, *runs[1])
    assert_same(snapshot_of(*runs[1]), snapshot_of(*runs[0]))
    for key, value in runs[0][1].param_groups[0].items():
        assert key == "params" or runs[1][1].param_groups[0][key] == value


@pytest.mark.parametrize("own", [{}, {"codec": "log8", "block_size": 128}, {"codec": "fp32"}])
def test_torchao(tmp_path: Path, own: dict[str, Any]) -> None:
    hyper = {"lr": torch.tensor(0.01), "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}
    state_dict = saved_torchao(tmp_path / "run.pt", hyper)
    with pytest.raises(CheckpointError, match="name the class with --optimizer"):
        convert(tmp_path / "run.pt", tmp_path / "converted", **own, piece_numel=PIECE)
    convert(tmp_path / "run.pt", tmp_path / "converted", **own, optimizer="AdamW", piece_numel=PIECE)
    options = own or {"codec": "dynamic8", "block_size": 256}
    assert_as_import_state(tmp_path / "converted", "AdamW", state_dict, **options)


@pytest.mark.parametrize("own", [{}, {"codec": "log8", "block_size": 128}, {"codec": "fp32"}])
@pytest.mark.parametrize("optimizer", ["AdamW", "Lion"])
def test_flashoptim(tmp_path: Path, optimizer: str, own: dict[str, Any]) -> None:
    def make(moments: Any) -> tuple[dict[str, Any], None]:
        state = flashoptim_state(moments)[0]
        state["error_bits"] = torch.ones(moments.signed.shape, dtype=torch.bfloat16)
        return {key: x for key, x in state.items() if optimizer == "AdamW" or "exp_avg_sq" not in key}, None

    hyper = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.0, "master_bytewidth": 3}
    state_dict = saved(tmp_path / "run.pt", make, hyper | ({"eps": 1e-7} if optimizer == "AdamW" else {}))
    converted = convert(tmp_path / "run.pt", tmp_path / "converted", **own, piece_numel=PIECE)
    assert converted.left_out == ["master_bytewidth=3 of param group 0", "error_bits of the state"]
    options = own or {"codec": "companded8", "block_size": 32}
    assert_as_import_state(tmp_path / "converted", optimizer, state_dict, **options)


@pytest.mark.parametrize("own", [{}, {"codec": "log8", "block_size": 128}])
def test_dion(tmp_path: Path, own: dict[str, Any]) -> None:
    matrices = [index for index, shape in enumerate(SHAPES) if len(shape) > 1]
    others = [index for index in range(len(SHAPES)) if index not in matrices]
    states: dict[int, dict[str, Any]] = {}
    for index, shape in enumerate(SHAPES):
        moments = made_up(shape, index)
        variance = {} if index in matrices else {"variance": moments.unsigned, "step_dev": torch.tensor(3.0)}
        states[index] = {"momentum": moments.signed, **variance}
    common = {"mu": 0.95, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "step": 3, "weight_decay": 0.01, "lr": 0.02}
    groups = [
        {"params": matrices, "algorithm": "muon", "adjust_lr": "rms_norm", **common},
        {"params": others, "algorithm": "adamw", **common},
    ]
    for group in groups:
        group["param_names"] = [f"p{index}" for index in group["params"]]
    state_dict = {"state": states, "param_groups": groups}
    torch.save({"model": Net().state_dict(), "optimizer": state_dict}, tmp_path / "run.pt")
    convert(tmp_path / "run.pt", tmp_path / "converted", **own, piece_numel=PIECE)
    runs = []
    for _ in range(2):
        model = Net()
        parts = [
            {"params": [getattr(model, f"p{index}") for index in group["params"]], "algorithm": group["algorithm"]}
            for group in groups
        ]
        runs.append((model, shardopt.Muon(parts, **own)))
    import_state(runs[0][1], state_dict)
    checkpoint.load(tmp_path / "converted", *runs[1])
    assert_same(snapshot_of(*runs[1]), snapshot_of(*runs[0]))
    for ours, theirs in zip(runs[1][1].param_groups, runs[0][1].param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


def test_dion_in_a_folder_of_dcp(tmp_path: Path) -> None:
    """The folder has the values of the file, and its moments are read, and scaled, in pieces."""
    model = Net()
    state = {"p0": {"momentum": made_up(SHAPES[0], 0).signed}}
    group = {"params": ["p0"], "algorithm": "muon", "mu": 0.95, "lr": 0.02, "weight_decay": 0.01, "step": 3}
    content = {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": [group]}}
    torch.save(content, tmp_path / "run.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(content, checkpoint_id=tmp_path / "folder")
    for source, target in (("run.pt", "of file"), ("folder", "of folder")):
        convert(tmp_path / source, tmp_path / target, piece_numel=PIECE)
    runs = [(Net(), target) for target in ("of file", "of folder")]
    snapshots = []
    for model, target in runs:
        optimizer = shardopt.Muon([model.p0], momentum=0.5)
        checkpoint.load(tmp_path / target, model, optimizer)
        snapshots.append(snapshot_of(model, optimizer))
    assert_same(*snapshots)


def test_packages_that_do_not_belong_together(tmp_path: Path) -> None:
    states = {0: flashoptim_state(made_up(SHAPES[0], 0))[0], 1: {"momentum": made_up(SHAPES[1], 1).signed}}
    optimizer = {"state": states, "param_groups": [{"params": list(range(len(SHAPES)))}]}
    torch.save({"model": Net().state_dict(), "optimizer": optimizer}, tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match="got the state of flashoptim and dion, expected that of one"):
        convert(tmp_path / "run.pt", tmp_path / "converted", piece_numel=PIECE)


def _quant(state_dict: dict[str, Any]) -> dict[str, Any]:
    return state_dict["state"][0]["__bnb_optimizer_quant_state__"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: _quant(s).update(absmax1=torch.zeros(3)), "got scales of shape"),
        (lambda s: _quant(s)["absmax2"].fill_(torch.nan), "got scales with NaN"),
        (lambda s: _quant(s).update(state2=_quant(s)["state2"][:8]), "got scales of shape|expected a dense tensor"),
        (lambda s: _quant(s).pop("state2"), "got state1, expected"),
        (lambda s: s["state"][0].update(step=-3), "got step as -3"),
        (lambda s: s["param_groups"][0].update(betas=(0.9,)), "expected those of one kind"),
    ],
)
def test_damaged_state_of_bitsandbytes(tmp_path: Path, change: Any, match: str) -> None:
    state_dict = saved(tmp_path / "run.pt", bitsandbytes_state, ADAM)
    change(state_dict)
    torch.save({"model": Net().state_dict(), "optimizer": state_dict}, tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match=match):
        convert(tmp_path / "run.pt", tmp_path / "converted", piece_numel=PIECE)
    assert not (tmp_path / "converted").exists()
