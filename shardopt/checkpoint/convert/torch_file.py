"""Files of ``torch.save({"model": ..., "optimizer": ...})``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import SpooledTemporaryFile
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.contents import model_key
from shardopt.checkpoint.convert.pickled import refusing
from shardopt.checkpoint.convert.recoding import class_named, made_optimizer
from shardopt.checkpoint.convert.state_dicts import is_whole_tensor, lazy_tensors, take_state_dicts
from shardopt.checkpoint.convert.stream import (
    Checkpoint,
    Piece,
    State,
    lazy,
    pieces_of_state,
    pieces_of_tensor,
    refuse_quantize_state,
)
from shardopt.checkpoint.convert.torch_archive import ArchivedTensor, TorchArchive, bytes_of
from shardopt.checkpoint.convert.torch_zip import torch_objects
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.folder import PathLike
from shardopt.checkpoint.peers.structure import check_structure
from shardopt.checkpoint.peers.torchao import CLASSES
from shardopt.checkpoint.wording import few, line
from shardopt.state.options import STATE_FORMAT
from shardopt.state.slice_spec import LOW_BITS

_SPOOLED = 1 << 22  # bytes of a moment in memory before its temporary file is used
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
    found = loaded(path, CLASSES)
    model, states = (_first(found, keys) for keys in (_MODEL, _OPTIMIZER))
    if not isinstance(found, Mapping) or not isinstance(model, Mapping) or not isinstance(states, Mapping | None):
        got = few(found) if isinstance(found, Mapping) else type(found).__name__
        raise CheckpointError(
            f'{text}: got {got}, expected {{"model": ..., "optimizer": ...}} with the state dicts of both; save them so'
        )
    checkpoint = Checkpoint(text)
    for key, value in found.items():
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
    with TorchArchive(Path(path)) as archive:
        model: dict[str, Any] = {}
        extra = dict(checkpoint.extra)
        for key, tensor in checkpoint.tensors.items():
            kind, _, name = key.partition(".")
            parts = _told(pieces_of_tensor(key, tensor, numel), progress)
            (model if kind == "model" else extra)[name] = archive.add(tensor.dtype, tensor.shape, parts)
        content = {**extra, "model": model}
        if checkpoint.optimizer is not None:
            content["optimizer"] = _optimizer_state(checkpoint, archive, numel, progress)
        archive.commit(content)


def _optimizer_state(
    checkpoint: Checkpoint, archive: TorchArchive, numel: int, progress: Callable[[int], object]
) -> dict[str, Any]:
    optimizer = made_optimizer(class_named(checkpoint.optimizer, checkpoint.path), checkpoint.groups, checkpoint)
    states: dict[int, dict[str, ArchivedTensor]] = {}
    groups = []
    number = 0
    for group, own in zip(checkpoint.groups, optimizer.param_groups, strict=True):
        ids = list(range(number, number + len(group["parameters"])))
        number += len(ids)
        for index, name in zip(ids, group["parameters"], strict=True):
            state = checkpoint.states.get(name)
            if state is not None:
                scalars = {"step": state.step, **optimizer.derived_state(own, state.step)}
                small = {key: archive.add(x.dtype, tuple(x.shape), [bytes_of(x)]) for key, x in scalars.items()}
                states[index] = {**small, **_moments(name, state, archive, numel, progress)}
        options = {key: value for key, value in group["options"].items() if key not in STATE_FORMAT}
        tuples = {key: tuple(value) for key, value in options.items() if isinstance(value, list)}
        groups.append({**options, **tuples, "params": ids, "param_names": list(group["parameters"])})
    return {"state": states, "param_groups": groups}


def _moments(
    name: str, state: State, archive: TorchArchive, numel: int, progress: Callable[[int], object]
) -> dict[str, ArchivedTensor]:
    """Writes the float32 moments of a parameter, which are read by turns, by way of temporary files."""
    shape = state.form.shard.global_shape
    with ExitStack() as closing:
        files = {
            moment.name: closing.enter_context(SpooledTemporaryFile(_SPOOLED, dir=str(archive.path.parent)))
            for moment in state.form.moments
        }
        for key, _, data in pieces_of_state(name, state, numel):
            progress(data.nbytes)
            entry = key.rpartition(".")[2]
            if entry in files:
                files[entry].write(bytes_of(data))
        found = {}
        for moment, file in files.items():
            file.seek(0)
            found[moment] = archive.add(torch.float32, shape, iter(partial(file.read, _SPOOLED), b""))
    return found


def _told(pieces: Iterator[Piece], progress: Callable[[int], object]) -> Iterator[memoryview]:
    """The bytes of pieces, of which progress is told."""
    for piece in pieces:
        yield bytes_of(piece.data)
        progress(piece.data.nbytes)


def _first(found: Any, keys: tuple[str, ...]) -> Any:
    return next((found[key] for key in keys if key in found), None) if isinstance(found, Mapping) else None


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
