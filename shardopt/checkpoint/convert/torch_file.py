"""Files of ``torch.save({"model": ..., "optimizer": ...})``."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shardopt.checkpoint.contents import model_key, state_key
from shardopt.checkpoint.convert.pickled import refusing
from shardopt.checkpoint.convert.recoding import class_named, made_optimizer
from shardopt.checkpoint.convert.state_dicts import is_whole_tensor, lazy_tensors, take_state_dicts
from shardopt.checkpoint.convert.stream import Checkpoint, lazy, places_of, refuse_quantize_state, write_pieces
from shardopt.checkpoint.convert.torch_zip import mapped_tensor, torch_objects
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.peers.structure import check_structure
from shardopt.checkpoint.peers.torchao import CLASSES
from shardopt.checkpoint.storage import PathLike
from shardopt.checkpoint.wording import few, line
from shardopt.state.options import STATE_FORMAT
from shardopt.state.slice_spec import LOW_BITS

_MODEL = ("model", "model_state_dict", "state_dict")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optim")


def read_torch(path: PathLike, optimizer: str | None) -> Checkpoint:
    """A file of ``torch.save``. Nothing but tensors and plain values is unpickled, and tensors are mapped into memory.

    Args:
        path: the file.
        optimizer: the optimizer's class; None to find it by options and entries.

    Raises:
        CheckpointError: the file is damaged, has anything else, or has no model or optimizer whose names can be told.
    """
    text = os.fspath(path)
    content = loaded(path, CLASSES)
    model, states = (_first(content, keys) for keys in (_MODEL, _OPTIMIZER))
    if not isinstance(content, Mapping) or not isinstance(model, Mapping) or not isinstance(states, Mapping | None):
        got = few(content) if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(
            f'{text}: got {got}, expected {{"model": ..., "optimizer": ...}} with the state dicts of both; save them so'
        )
    checkpoint = Checkpoint(text)
    for key, value in content.items():
        if key not in (*_MODEL, *_OPTIMIZER):
            _take_extra(checkpoint, key, value)
    tensors = lazy_tensors(text, model, "the model")
    if states is None:
        checkpoint.tensors |= {model_key(name): tensor for name, tensor in tensors.items()}
        return checkpoint
    try:
        check_structure(states, frozenset())
    except ValueError as error:
        raise CheckpointError(f"{text}: {line(error)}") from error
    take_state_dicts(checkpoint, tensors, states["state"], states["param_groups"], optimizer)
    return checkpoint


def loaded(path: PathLike, classes: Mapping[tuple[str, str], Any] = MappingProxyType({})) -> Any:
    """The objects that ``torch.save`` wrote into a file: tensors, mapped into memory, and plain values.

    Args:
        path: the file.
        classes: what stands for further classes and functions, by module and name.

    Raises:
        CheckpointError: the file is damaged, or has anything else.
    """
    expected = "one of torch.save with tensors, dicts, lists, texts and numbers only; save it again"
    with refusing(os.fspath(path), expected), open(path, "rb") as file:
        return torch_objects(file.fileno(), 0, os.fstat(file.fileno()).st_size, classes)


def write_torch(checkpoint: Checkpoint, path: PathLike, numel: int, progress: Callable[[int], object]) -> None:
    """Writes a file as ``torch.save({"model": ..., "optimizer": optimizer.state_dict(dequantize=True)})`` does.

    Moments are float32, and param groups have ``param_names``: the optimizer of the same name in torch.optim loads it,
    and so does shardopt's.

    Args:
        checkpoint: what to write, with float32 state.
        path: the file, which must not exist.
        numel: elements of a piece.
        progress: called with the bytes of each piece that was written.

    Raises:
        CheckpointError: the checkpoint could not be read, or the format has no place for it.
        OSError: the system fails to write.
    """
    refuse_quantize_state(checkpoint, "load it, and save state_dict(dequantize=True)")
    if any(LOW_BITS in state.form.entries for state in checkpoint.states.values()):
        checkpoint.left_out.append("low bits of master weights")
    with TemporaryFile(dir=Path(path).parent) as pieces, open(path, "xb") as file:
        content = _content(checkpoint, _tensors_by_way_of(pieces, checkpoint, numel, progress))
        try:
            torch.save(content, file)
        except RuntimeError as error:  # PyTorch's, of an archive that is not complete; the cause stands behind it
            raise error.__context__ or error from None
        file.flush()
        os.fsync(file.fileno())


def _tensors_by_way_of(
    file: BinaryIO, checkpoint: Checkpoint, numel: int, progress: Callable[[int], object]
) -> dict[str, Tensor]:
    """Writes the tensors of a checkpoint, but no step counts and low bits, into a file, and maps them into memory.

    A parameter's moments are read by turns, but torch.save writes one tensor after another, whole ones only.
    """
    described = checkpoint.described
    moments = [
        state_key(name, moment.name) for name, state in checkpoint.states.items() for moment in state.form.moments
    ]
    places = places_of({key: described[key] for key in (*checkpoint.tensors, *moments)})
    write_pieces(checkpoint, file, places, numel, progress)
    file.seek(0, os.SEEK_END)
    file.write(b"\0")  # an empty file cannot be mapped
    file.flush()
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {key: mapped_tensor(memory, *described[key], place) for key, place in places.items()}


def _content(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The objects to save."""
    model: dict[str, Tensor] = {}
    extra = dict(checkpoint.extra)
    for key in checkpoint.tensors:
        kind, _, name = key.partition(".")
        (model if kind == "model" else extra)[name] = tensors[key]
    content = {**extra, "model": model}
    if checkpoint.optimizer is not None:
        content["optimizer"] = _optimizer_state(checkpoint, tensors)
    return content


def _optimizer_state(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    optimizer = made_optimizer(class_named(checkpoint.optimizer, checkpoint.path), checkpoint.groups, checkpoint)
    states: dict[int, dict[str, Tensor]] = {}
    groups = []
    number = 0
    for group, made_group in zip(checkpoint.groups, optimizer.param_groups, strict=True):
        ids = list(range(number, number + len(group["parameters"])))
        number += len(ids)
        for index, name in zip(ids, group["parameters"], strict=True):
            state = checkpoint.states.get(name)
            if state is not None:
                scalars = {"step": state.step.clone(), **optimizer.derived_state(made_group, state.step)}
                moments = {moment.name: tensors[state_key(name, moment.name)] for moment in state.form.moments}
                states[index] = {**scalars, **moments}
        options = {key: value for key, value in group["options"].items() if key not in STATE_FORMAT}
        tuples = {key: tuple(value) for key, value in options.items() if isinstance(value, list)}
        groups.append({**options, **tuples, "params": ids, "param_names": list(group["parameters"])})
    return {"state": states, "param_groups": groups}


def _first(content: Any, keys: tuple[str, ...]) -> Any:
    return next((content[key] for key in keys if key in content), None) if isinstance(content, Mapping) else None


def _take_extra(checkpoint: Checkpoint, key: Any, value: Any) -> None:
    """Takes a further value of the file, if it is a tensor or JSON can hold it."""
    if isinstance(key, str) and is_whole_tensor(value):
        assert isinstance(value, Tensor)
        checkpoint.tensors[f"extra.{key}"] = lazy(value)
        return
    try:
        text = json.dumps(value) if isinstance(key, str) else None
    except (TypeError, ValueError, RecursionError):
        text = None
    if text is None:
        checkpoint.left_out.append(line(key))
    else:
        checkpoint.extra[key] = json.loads(text)
