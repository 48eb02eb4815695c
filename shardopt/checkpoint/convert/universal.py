"""DeepSpeed's universal checkpoints: float32 weights and Adam's moments, a folder per parameter. Source only.

A universal checkpoint cannot be made of another checkpoint alone: the files ``*_model_states.pt`` have the counters and
the config of an engine.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.convert.pickled import Dict, Unused
from shardopt.checkpoint.convert.state_dicts import is_whole_tensor, take_state_dicts
from shardopt.checkpoint.convert.stream import Checkpoint, LazyTensor, elements, lazy
from shardopt.checkpoint.convert.torch_file import loaded
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.storage import PathLike
from shardopt.checkpoint.wording import few, named, shown
from shardopt.optim.loading import HELD
from shardopt.state.options import STATE_FORMAT

COMMON = "zero/optimizer_state.pt"
_MODEL_FILES = "*model_states.pt"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_RECENT = 4  # files that stay mapped, each of which takes a descriptor: a parameter's state has as many
_REMEDY = "make it again with deepspeed.checkpoint.ds_to_universal"


def _unused_member(kind: Any, name: Any) -> None:
    """In place of ``getattr``, by which Python 3.11.0 to 3.11.3 pickle members of an Enum."""
    if kind is not Unused:
        raise pickle.UnpicklingError(f"getattr of {type(kind).__name__}")


_LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_MOMENT_VIEW = "shardopt.sharding.deepspeed.moment_view"

#: Stand-ins for classes in ``optimizer_state.pt``.
_CLASSES: dict[tuple[str, str], Any] = {
    (_LOSS_SCALER, "LossScaler"): Unused,
    (_LOSS_SCALER, "DynamicLossScaler"): Unused,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): Unused,
    ("builtins", "getattr"): _unused_member,
    (_MOMENT_VIEW, "MomentView"): Unused,
    (_MOMENT_VIEW, "SavedBuffer"): Unused,
    (_MOMENT_VIEW, "SavedState"): Dict,
}


def read_universal(path: PathLike, optimizer: str | None) -> Checkpoint:
    """A universal checkpoint of Adam or AdamW, of DeepSpeed, torch.optim or shardopt.

    Weights are the float32 masters. Nothing but tensors and plain values is unpickled.

    Args:
        path: the folder, with ``zero`` and the files ``*_model_states.pt`` in it.
        optimizer: the optimizer's class; None to take what the engine's config says.

    Raises:
        CheckpointError: the folder is damaged, or has anything else.
    """
    folder = Path(path)
    common = _mapping(loaded(folder / COMMON, _CLASSES), folder / COMMON)
    model_files = sorted(folder.glob(_MODEL_FILES))
    if not model_files:
        raise CheckpointError(f"{folder}: got no {_MODEL_FILES}, expected the files of the engine's ranks; {_REMEDY}")
    models = [_mapping(loaded(file), file) for file in model_files]
    shapes = _shapes(models, model_files[0])
    groups = _groups(common, shapes, folder / COMMON)
    checkpoint = Checkpoint(os.fspath(path))
    model: dict[str, LazyTensor] = {}
    states: dict[str, dict[str, Any]] = {}
    recent = lru_cache(_RECENT)(_param)

    def read_again(path: Path, shape: tuple[int, ...]) -> LazyTensor:
        tensor = _param(path, shape)
        return LazyTensor(tensor.dtype, tuple(tensor.shape), lambda *where: elements(recent(path, shape), *where))

    for index, of_group in enumerate(shapes):
        for name, shape in of_group.items():
            of_param = _folder_of(folder, name)
            model[name] = read_again(of_param / "fp32.pt", shape)
            if (of_param / "exp_avg.pt").is_file():
                states[name] = {key: read_again(of_param / f"{key}.pt", shape) for key in _MOMENTS}
                states[name]["step"] = _step(of_param, common, index, folder / COMMON)
    for file, of_rank in zip(model_files, models, strict=True):
        _take_others(model, of_rank, file)
    take_state_dicts(checkpoint, model, states, groups, optimizer or _class_in_config(models[0]))
    return checkpoint


def _shapes(models: Sequence[Mapping[str, Any]], path: Path) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of each param group's parameters, of all pipeline stages."""
    shapes: list[dict[str, tuple[int, ...]]] = []
    for model in models:
        listed = model.get("param_shapes")
        if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
            raise CheckpointError(f"{path}: got param_shapes as {shown(listed)}, expected a list of dicts; {_REMEDY}")
        shapes += [{} for _ in range(len(listed) - len(shapes))]
        for of_group, of_rank in zip(shapes, listed, strict=False):
            for name, shape in of_rank.items():
                if not isinstance(shape, tuple):
                    raise CheckpointError(f"{path}: got {shown(shape)} for {named(name)}, expected a shape; {_REMEDY}")
                of_group.setdefault(name, tuple(shape))
    return shapes


def _groups(common: Mapping[str, Any], shapes: list[dict[str, tuple[int, ...]]], path: Path) -> list[dict[str, Any]]:
    """The param groups, with the parameters' names."""
    groups = common.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups) or not groups:
        raise CheckpointError(f"{path}: got param_groups as {shown(groups)}, expected a list of dicts; {_REMEDY}")
    if len(groups) == 1:
        names = [[name for of_group in shapes for name in of_group]]
    elif len(groups) == len(shapes):
        names = [list(of_group) for of_group in shapes]
    else:
        raise CheckpointError(
            f"{path}: got {len(groups)} param groups and {len(shapes)} sub-groups of parameters, expected as many, as "
            "nothing else tells which belong together; load it into an engine, and save with shardopt.checkpoint.save"
        )
    left_out = {"params", "step", HELD, *STATE_FORMAT}  # moments are float32, whatever the engine's codec was
    return [
        {**{key: value for key, value in group.items() if key not in left_out}, "params": of_group}
        for group, of_group in zip(groups, names, strict=True)
    ]


def _folder_of(folder: Path, name: object) -> Path:
    if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", "..") or not name.isprintable():
        raise CheckpointError(f"{folder}: got a parameter {named(name)}, expected names of folders in zero; {_REMEDY}")
    return folder / "zero" / name


def _param(path: Path, shape: tuple[int, ...]) -> Tensor:
    """The tensor in a file, in its shape: ZeRO 3 writes it flat."""
    content = loaded(path) if path.is_file() else None
    tensor = content.get("param") if isinstance(content, Mapping) else content
    if not is_whole_tensor(tensor):
        raise CheckpointError(f"{path}: got {type(tensor).__name__}, expected a file with a tensor; {_REMEDY}")
    assert isinstance(tensor, Tensor)
    if tensor.dim() == 1 and len(shape) != 1:
        if tensor.numel() != torch.Size(shape).numel():
            raise CheckpointError(f"{path}: got {tensor.numel()} elements, expected those of {shown(shape)}; {_REMEDY}")
        return tensor.view(shape)
    return tensor  # whole, where tensor parallel ranks have parts of this shape


def _step(folder: Path, common: Mapping[str, Any], index: int, path: Path) -> Any:
    """The step count of a parameter: its own, or that of its flat buffer or param group."""
    if (folder / "step.pt").is_file():
        return _number(loaded(folder / "step.pt"))
    states = _mapping(common.get("optimizer_state_dict", {}), path).get("state", {})
    state = _mapping(states, path).get(index, {})
    groups = common["param_groups"]
    group = groups[index] if index < len(groups) else groups[0]
    step = _mapping(state, path).get("step", group.get("step"))
    if step is None:
        raise CheckpointError(f"{path}: got no step count, expected one; {_REMEDY} --inject_missing_state")
    return _number(step)


def _number(step: Any) -> Any:
    return lazy(step.reshape(()).clone()) if is_whole_tensor(step) and step.numel() == 1 else step


def _take_others(model: dict[str, LazyTensor], of_rank: Mapping[str, Any], path: Path) -> None:
    """Takes buffers and frozen parameters, which have no folder, from a rank's file."""
    module = _mapping(of_rank.get("module") or {}, path)
    frozen = _mapping(of_rank.get("frozen_param_shapes") or {}, path)
    for name, tensor in module.items():
        if name in model:
            continue
        if not is_whole_tensor(tensor) or (name in frozen and tuple(tensor.shape) != tuple(frozen[name])):
            raise CheckpointError(
                f"{path}: got {named(name)} in parts, expected buffers and frozen parameters whole; load it into an "
                "engine, and save with shardopt.checkpoint.save"
            )
        model[name] = lazy(tensor)
    missing = frozen.keys() - model.keys()
    if missing:
        raise CheckpointError(f"{path}: got no values of {few(missing)}, expected all that are frozen; {_REMEDY}")


def _class_in_config(model: Mapping[str, Any]) -> str | None:
    """The optimizer's class by the engine's config; None without one."""
    config = model.get("ds_config")
    described = config.get("optimizer") if isinstance(config, Mapping) else None
    kind = described.get("type") if isinstance(described, Mapping) else None
    if not isinstance(described, Mapping) or not isinstance(kind, str):
        return None
    if kind.lower() == "adam":  # DeepSpeed's and torch's of this type decay weights as AdamW unless told otherwise
        params = described.get("params")
        decoupled = params.get("adam_w_mode", True) if isinstance(params, Mapping) else True
        return "AdamW" if decoupled else "Adam"
    return kind.removesuffix("8bit").removesuffix("4bit")


def _mapping(content: Any, path: Path) -> Mapping[Any, Any]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: got {type(content).__name__}, expected a dict; {_REMEDY}")
    return content
