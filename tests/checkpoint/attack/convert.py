"""Damaged and hostile files of other packages: mutations of files of torch.save, safetensors, DCP and DeepSpeed,
converted.

A conversion may refuse with a CheckpointError, and has then left nothing behind. If it succeeds, a strict reading of
the target finds a whole checkpoint; only portable checkpoints have checksums, so that its values may be others. Where a
mutation changes no value, the target has the tensors that the unchanged source has, bit for bit.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import warnings
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.state_dict import get_state_dict

from attack import damage
from attack.forked import Outcome, call, fault, ok, shown
from attack.hostile import refused
from attack.index_file import INDEX, Tensors, strict_tensors
from attack.torch_files import Archive, mutated_archive, mutated_objects, mutated_pickle
from foreign_states import GROUPS, STATES, made_up, save_torchao
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.convert import FORMATS, convert

SOURCES = ("torch", "bitsandbytes", "torchao", "flashoptim", "safetensors", "dcp", "universal")
#: Sources that are a single file.
FILES = SOURCES[:5]
#: Bytes of addresses beyond those of the process: files are mapped, and some have holes of a terabyte.
ADDRESSES = 1 << 30

_whole: dict[str, Tensors | str] = {}
_objects: dict[str, Any] = {}


def prepare(base: Path) -> None:
    """Makes a source of each kind, and what it is converted to."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 5, bias=False))
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())  # not row-major
    optimizer = torch.optim.AdamW(model.named_parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    sources = {kind: base / "pristine" / kind for kind in SOURCES}
    for path in sources.values():
        path.mkdir(parents=True)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer, "epoch": 3}, checkpoint_id=sources["dcp"])
    state = optimizer.state_dict()
    files = {
        "torch/run.pt": {"model": model.state_dict(), "optimizer": state, "epoch": 3},
        "universal/zero/optimizer_state.pt": {"param_groups": [{**state["param_groups"][0], "params": [0]}]},
        "universal/mp_rank_00_model_states.pt": {
            "param_shapes": [{name: param.shape for name, param in model.named_parameters()}],
            "module": dict(model.state_dict()),
            "ds_config": {"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}},
        },
    }
    for index, (name, param) in enumerate(model.named_parameters()):
        moments = {key: state["state"][index][key] for key in ("exp_avg", "exp_avg_sq")}
        for key, value in {"fp32": param.detach(), **moments}.items():
            files[f"universal/zero/{name}/{key}.pt"] = {"param": value.reshape(-1).clone()}
        files[f"universal/zero/{name}/step.pt"] = state["state"][index]["step"]
    for file, content in files.items():
        path = base / "pristine" / file
        path.parent.mkdir(exist_ok=True)
        torch.save(content, path)
        _objects[file] = content
    for package in ("bitsandbytes", "torchao", "flashoptim"):
        _objects[f"{package}/run.pt"] = _of_package(package, base / "pristine" / package / "run.pt")
    convert(
        _source(base / "pristine", "torch"), _source(base / "pristine", "safetensors"), "safetensors", optimizer="AdamW"
    )
    _objects["dcp/.metadata"] = dcp.FileSystemReader(sources["dcp"]).read_metadata()
    for kind in SOURCES:
        convert(_source(base / "pristine", kind), base / f"whole {kind}", optimizer="AdamW")
        _whole[kind] = _tensors(base / f"whole {kind}")
        assert isinstance(_whole[kind], dict), _whole[kind]


def _of_package(package: str, path: Path) -> dict[str, Any]:
    """Saves a model and another package's optimizer, and returns the objects."""
    shapes = ((16, 512), (7,))  # a matrix that all of them quantize, and a vector that none does
    content = {
        "model": {f"p{index}": torch.randn(shape) for index, shape in enumerate(shapes)},
        "optimizer": {
            "state": {index: STATES[package](made_up(shape, index))[0] for index, shape in enumerate(shapes)},
            "param_groups": [{"lr": 0.5, **GROUPS[package], "params": [0, 1]}],
        },
    }
    save_torchao(content, path)
    return content


def attack(seed: int, number: int, base: Path) -> Outcome:
    """Converts what one mutation makes of a source."""
    rng = Random(f"convert {seed} {number}")
    folder = base / "checkpoint"
    damage.remove(folder)
    shutil.copytree(base / "pristine", folder)
    kind = rng.choice(SOURCES)
    path = rng.choice(sorted(path for path in (folder / kind).rglob("*") if path.is_file()))
    keeps, what = (True, "none") if number == 0 else _mutate(rng, path, str(path.relative_to(folder)))
    to = "portable" if keeps else rng.choice(["portable", *FORMATS])
    codec = rng.choice([None, "log8"]) if to != "torch" and not keeps else None
    work = folder / kind
    before = sorted(os.listdir(work)) if work.is_dir() else []
    outcome = call(lambda: _check(folder, kind, to, codec, before, keeps), addresses=ADDRESSES)
    if number == 0 and outcome.fault is False and outcome.kind != "the same":
        outcome = fault("refused without damage", str(outcome))
    return outcome._replace(attack=f"{path.relative_to(folder)} to {to}: {what}")


def _mutate(rng: Random, path: Path, file: str) -> tuple[bool, str]:
    """Mutates a file. Whether it still has the same values, and what was done."""
    how = rng.choice(["pickle", "pickle", "objects", "zip", "zip", "bytes"])
    if how == "bytes" or file.startswith("safetensors/") or (how == "objects" and file.startswith("dcp/__")):
        mutate = rng.choice([each for each in damage.MUTATIONS if each not in damage.OF_SEVERAL_FILES])
        return False, f"{mutate.__name__.strip('_')} {mutate(rng, path)}"
    if file == "dcp/.metadata":
        if how == "objects":
            return False, _mutate_metadata(rng, path)
        data, what = mutated_pickle(rng, path.read_bytes())
        path.write_bytes(data)
        return False, what
    if file.startswith("dcp/__"):
        return _mutate_chunk(rng, path, how)
    if how == "objects":
        content, what = mutated_objects(rng, copy.deepcopy(_objects[file]))
        if file.startswith("torchao"):
            return False, _save_torchao_mutation(content, path, what)
        torch.save(content, path)
        return False, what
    archive = Archive.read(path.read_bytes())
    data, keeps, what = _mutated(rng, archive, how)
    path.write_bytes(data)
    return keeps, what


def _mutated(rng: Random, archive: Archive, how: str) -> tuple[bytes, bool, str]:
    if how == "pickle":
        archive.records["data.pkl"], what = mutated_pickle(rng, archive.records["data.pkl"])
        return archive.written(), False, what
    return mutated_archive(rng, archive)


def _save_torchao_mutation(content: Any, path: Path, what: str) -> str:
    try:
        save_torchao(content, path)
    except (AttributeError, LookupError, TypeError):  # no longer a state dict whose states can be wrapped
        return f"nothing: {what}"
    return what


def _mutate_metadata(rng: Random, path: Path) -> str:
    content, what = mutated_objects(rng, copy.deepcopy(_objects["dcp/.metadata"]))
    try:
        path.write_bytes(pickle.dumps(content))
    except RuntimeError as error:  # of DCP's own classes, which check some values
        return f"nothing: {error}"
    return what


def _mutate_chunk(rng: Random, path: Path, how: str) -> tuple[bool, str]:
    """Mutates what torch.save wrote into a range of DCP's data file, and moves the range to the file's end."""
    content = copy.deepcopy(_objects["dcp/.metadata"])
    stored = content.storage_data[rng.choice(sorted(content.storage_data, key=str))]
    data = path.read_bytes()
    archive = Archive.read(data[stored.offset : stored.offset + stored.length])
    mutation, keeps, what = _mutated(rng, archive, how)
    stored.offset, stored.length = len(data), len(mutation)
    path.write_bytes(data + mutation)
    (path.parent / ".metadata").write_bytes(pickle.dumps(content))
    return keeps, what


def _check(folder: Path, kind: str, to: str, codec: str | None, before: list[str], keeps: bool) -> Outcome:
    """Converts, in a process of its own."""
    damage.be_anybody()
    classes = {
        each: dict(vars(each)) for each in (metadata.Metadata, metadata.MetadataIndex, metadata.TensorProperties)
    }
    target = folder.parent / "target"
    damage.remove(target)
    others = set(os.listdir(folder.parent))
    try:
        convert(_source(folder, kind), target, to, codec=codec, optimizer="AdamW")
    except CheckpointError as error:
        outcome = refused(error, folder)
        if os.path.lexists(target):
            outcome = fault("a target after an error", str(outcome))
        elif keeps:
            outcome = fault("refused without damage", shown(str(error)))
    except BaseException as error:
        outcome = fault(f"convert: {type(error).__name__}", shown(str(error)))
    else:
        outcome = _succeeded(target, kind, to, keeps)
    if set(os.listdir(folder.parent)) - others - {"target"}:
        return fault("left files behind", shown(sorted(os.listdir(folder.parent))))
    if any(dict(vars(each)) != was for each, was in classes.items()):
        return fault("changed a class of the process", str(outcome))
    return outcome


def _succeeded(target: Path, kind: str, to: str, keeps: bool) -> Outcome:
    if to != "portable":
        return ok(f"converted to {to}")
    found = _tensors(target)
    if isinstance(found, str):
        return fault("wrote what the format forbids", found)
    same = found == _whole[kind]
    if keeps and not same:
        return fault("other values, though the mutation changes none")
    return ok("the same" if same else "converted to other values")


def _source(folder: Path, kind: str) -> Path:
    return folder / kind / "run.pt" if kind in FILES else folder / kind


def _tensors(folder: Path) -> Tensors | str:
    return strict_tensors(folder, json.loads((folder / INDEX).read_bytes()), lambda name: True)
