"""Model and optimizer in one file of the safetensors format, https://github.com/huggingface/safetensors.

Parameters and buffers are ``model.<name>``, state entries ``optimizer.<name>.<entry>``; the param groups stand as JSON
in the header's metadata. There is no checksum: :func:`shardopt.checkpoint.save` has them.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from shardopt.checkpoint.contents import model_key, state_key
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.foreign.plain_json import is_count, parsed
from shardopt.checkpoint.foreign.safetensors_reader import SafetensorsReader
from shardopt.checkpoint.foreign.safetensors_writer import DTYPES, Description, SafetensorsWriter
from shardopt.checkpoint.foreign.targets import names_of, part_of, sharded
from shardopt.checkpoint.groups import SavedGroup, checked_groups, describe, merged_from, options_by_name, saved_options
from shardopt.checkpoint.ranks import on_every_rank
from shardopt.checkpoint.wording import few, line, named, shown
from shardopt.codec import Moment
from shardopt.layout import Shard, shard_of
from shardopt.layout.names import buffer_names, parameter_names
from shardopt.optim import ShardedOptimizer
from shardopt.state.loaded_entries import check_moment
from shardopt.state.options import STATE_FORMAT
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.state.tensor_state import TensorState, tensor_state_of

FORMAT_VERSION = 1
KEY = "shardopt"  # of the metadata
_EXPECTED = "expected what save_safetensors writes; save it again"

PathLike = str | os.PathLike[str]


class _Entry(NamedTuple):
    """A tensor to save, and a function that returns this rank's part of the tensor."""

    what: Description
    get: Callable[[], Tensor]


class Header(NamedTuple):
    """The content of the metadata.

    Attributes:
        dequantized: whether moments are in float32.
        param_groups: parameter names and options of each group.
        optimizer: the name of the optimizer's class; None in files of earlier versions.
    """

    dequantized: bool
    param_groups: list[SavedGroup]
    optimizer: str | None


class _Wanted(NamedTuple):
    """A parameter and its state in a file.

    Attributes:
        param: the parameter.
        spec: the form of the state in the optimizer.
        entries: the state entries in the file, as whole tensors on the meta device.
    """

    param: Tensor
    spec: TensorState
    entries: Mapping[str, Tensor]


@torch.no_grad()
def save_safetensors(path: PathLike, model: Module, optimizer: ShardedOptimizer, *, dequantize: bool = False) -> None:
    """Saves a model and its optimizer as one safetensors file, for use in one process or by other tools.

    All ranks must call this; rank 0 writes, and must hold a part of every parameter. Gathers tensors one after another,
    so that every rank needs memory for one whole tensor at a time. Replaces a previous file at `path` once the new file
    is complete, and keeps the previous file if saving fails.

    Args:
        path: the file.
        model: a model that is plain, wrapped by DDP, or of DTensors. Saves its parameters and persistent buffers.
        optimizer: an optimizer of parameters of the model.
        dequantize: save float32 moments, as ``optimizer.state_dict(dequantize=True)``, for optimizers of any codec and
            for other packages. Takes 4 bytes per parameter and moment, and leaves out the low bits of master weights.

    Raises:
        CheckpointError: the file could not be written.
        ValueError: a parameter is flat, the optimizer has parameters that the model does not have, or a tensor has a
            dtype that this format does not support here, such as complex numbers. Nothing was written.
    """
    entries, metadata = on_every_rank(lambda: _to_save(model, optimizer, dequantize))
    failure: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        with SafetensorsWriter(path, [entry.what for entry in entries], metadata) as writer:
            for entry in entries:
                writer.write(_whole(entry.get()))
            writer.commit()
            failure = writer.failure
    else:
        for entry in entries:
            _whole(entry.get())
    size = sum(entry.what.dtype.itemsize * math.prod(entry.what.shape) for entry in entries)
    on_every_rank(lambda: _demand_written(path, size, failure))


@torch.no_grad()
def load_safetensors(path: PathLike, model: Module, optimizer: ShardedOptimizer) -> None:
    """Loads a file of :func:`save_safetensors`, under any sharding. All ranks must call this.

    Restores codes and scales bit for bit; quantizes float32 moments. Reads and verifies the whole file before changing
    anything: every rank reads the file, and needs host memory for its part of the file and one whole tensor at a time.

    Args:
        path: the file.
        model: a model with the same parameters and buffers, plain, wrapped by DDP, or of DTensors.
        optimizer: an optimizer with the same parameters. Unless the file has float32 moments, codec, block size and
            other options of the state's format must be the same, too.

    Raises:
        CheckpointError: the file is missing, damaged, of another kind, of a newer version, or of another model or
            optimizer, or has hyper-parameters or state from which no step could go on. Nothing was changed.
        ValueError: a parameter is flat, or the optimizer has parameters that the model does not have. Nothing was
            changed.
    """
    names = names_of(model, optimizer)
    tensors = _tensors_of(model)
    with on_every_rank(lambda: SafetensorsReader(path)) as file:
        wanted, groups = on_every_rank(lambda: _plan(os.fspath(path), file, tensors, optimizer, names))
        entries, values = on_every_rank(lambda: (_read_states(path, file, wanted, names), _read_model(file, tensors)))
    state = {index: _encoded(each.spec, entries.pop(index)) for index, each in wanted.items()}
    on_every_rank(lambda: _check_values(path, wanted, state, names))
    with _naming(path):
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    for name, value in tensors.items():
        shard_of(value).local(value).copy_(values[name])


@contextmanager
def _naming(path: PathLike) -> Iterator[None]:
    """Raises an error about a file's content as a CheckpointError that names the file."""
    try:
        yield
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{os.fspath(path)}: {line(error)}") from error


def _check_values(
    path: PathLike, wanted: Mapping[int, _Wanted], state: Mapping[int, StateDict], names: Mapping[int, str]
) -> None:
    """Checks what this rank's parts of the states stand for."""
    for index, (param, spec, _) in wanted.items():
        with _naming(path):
            spec.check_local(state[index], names[id(param)])


def _demand_written(path: PathLike, size: int, failure: Exception | None) -> None:
    if isinstance(failure, OSError):
        raise CheckpointError(
            f"{path}: got {failure} while writing {size} bytes, expected room for them; what stood there stays"
        ) from failure
    if failure is not None:
        raise CheckpointError(
            f"{path}: got {type(failure).__name__} while writing {size} bytes: {failure}; what stood there stays"
        ) from failure


def _to_save(model: Module, optimizer: ShardedOptimizer, dequantize: bool) -> tuple[list[_Entry], dict[str, str]]:
    """All tensors of a file in their order, and its metadata.

    Raises:
        ValueError: the file cannot hold one, the parameters are flat, or the optimizer has others than the model.
    """
    names = names_of(model, optimizer)
    optimizer.synchronize()
    entries = [_entry(model_key(name), value) for name, value in _tensors_of(model).items()]
    entries += _state_entries(optimizer, names, dequantize)
    for name, dtype, _ in (entry.what for entry in entries):
        if dtype not in DTYPES:
            raise ValueError(
                f"got {named(name)} of {dtype}, expected one of {', '.join(map(str, DTYPES))}; register it with "
                "persistent=False, or save with shardopt.checkpoint.save"
            )
    entries.sort(key=lambda entry: -entry.what.dtype.itemsize)  # so that each tensor begins aligned
    groups = [describe(group, [names[id(param)] for param in group["params"]]) for group in optimizer.param_groups]
    for group in groups if dequantize else ():
        group["options"] = {key: value for key, value in group["options"].items() if key not in STATE_FORMAT}
    header = {
        "format_version": FORMAT_VERSION,
        "dequantized": dequantize,
        "optimizer": type(optimizer).__name__,
        "param_groups": groups,
    }
    return entries, {"format": "pt", KEY: json.dumps(header)}


def _tensors_of(model: Module) -> dict[str, Tensor]:
    tensors = {**parameter_names(model), **buffer_names(model)}
    return {name: value.detach() for name, value in tensors.items()}


def _whole(tensor: Tensor) -> Tensor:
    """The global value of a tensor; where it is a DTensor, all ranks must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    on_mesh = tensor.to(tensor.device_mesh.device_type)  # of an offloaded parameter it lies on the host
    whole: Tensor = on_mesh.full_tensor()  # type: ignore[attr-defined]
    return whole


def _state_entries(optimizer: ShardedOptimizer, names: Mapping[int, str], dequantize: bool) -> Iterator[_Entry]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            name, state = names[id(param)], optimizer.state.get(param, {})
            spec = tensor_state_of(param, group, optimizer.rule(group).moments)
            for key, value in state.items():
                if key == "step" or not dequantize:
                    yield _entry(state_key(name, key), value)
            if state and dequantize:
                for moment in spec.moments:
                    yield _decoded(state_key(name, moment.name), spec, state, moment)


def _entry(name: str, value: Tensor) -> _Entry:
    return _Entry(Description(name, value.dtype, tuple(value.shape)), lambda: value)


def _decoded(name: str, spec: TensorState, state: StateDict, moment: Moment) -> _Entry:
    return _Entry(Description(name, torch.float32, spec.shard.global_shape), lambda: spec.decode(state)[moment.name])


def _plan(
    path: str,
    file: SafetensorsReader,
    tensors: Mapping[str, Tensor],
    optimizer: ShardedOptimizer,
    names: Mapping[int, str],
) -> tuple[dict[int, _Wanted], list[dict[str, Any]]]:
    """Plans the reads for each of the optimizer's parameters, and returns the new param groups.

    Raises:
        CheckpointError: the file is not of this model and optimizer.
    """
    header = header_in(path, file)
    expected = {model_key(name): value for name, value in tensors.items()}
    _check(path, file, "model", {name for name in file.tensors if name.startswith("model.")}, expected)
    entries_of: dict[str, set[str]] = {}
    for key in file.tensors:
        if key.startswith("optimizer."):
            name = key.removeprefix("optimizer.").rpartition(".")[0]
            entries_of.setdefault(name, set()).add(key)
    wanted: dict[int, _Wanted] = {}
    groups: list[dict[str, Any]] = []
    numbers = itertools.count()
    saved = options_by_name(header.param_groups)
    for index, group in enumerate(optimizer.param_groups):
        with _naming(path):
            options = saved_options(saved, [names[id(param)] for param in group["params"]], index)
        left_out: tuple[str, ...] = ("params", "param_names")
        if header.dequantized:
            left_out += STATE_FORMAT  # as torch.optim's state, it belongs to no format of ours
        else:
            _check_format(path, group, options)
        ids = list(itertools.islice(numbers, len(group["params"])))
        with _naming(path):
            new = merged_from(optimizer, group, options, index)
        groups.append({k: v for k, v in new.items() if k not in left_out} | {"params": ids})
        for number, param in zip(ids, group["params"], strict=True):
            name = names[id(param)]
            if name in entries_of:
                spec = tensor_state_of(param, group, optimizer.rule(group).moments)
                entries = _saved_entries(spec.slices[0].spec, dequantized=header.dequantized)
                _check(path, file, name, entries_of[name], {state_key(name, key): x for key, x in entries.items()})
                wanted[number] = _Wanted(param, spec, entries)
    return wanted, groups


def header_in(path: str, file: SafetensorsReader) -> Header:
    """The content of a file's metadata, which may be damaged.

    Raises:
        CheckpointError: the file is of another kind or of a newer version, or its metadata are damaged.
    """
    text = file.metadata.get(KEY)
    if text is None:
        raise CheckpointError(f"{path}: got a safetensors file of another kind, expected one by save_safetensors")
    try:
        header = parsed(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: got metadata with {error}, {_EXPECTED}") from error
    fields = header if isinstance(header, dict) else {}
    version, dequantized, groups = (fields.get(key) for key in ("format_version", "dequantized", "param_groups"))
    if not is_count(version) or not isinstance(dequantized, bool):
        raise CheckpointError(
            f"{path}: got format_version {shown(version)} and dequantized {shown(dequantized)}, {_EXPECTED}"
        )
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: got format version {shown(version)}, expected at most {FORMAT_VERSION}; update shardopt"
        )
    optimizer = fields.get("optimizer")
    return Header(dequantized, checked_groups(path, groups), optimizer if isinstance(optimizer, str) else None)


def _saved_entries(spec: SliceSpec, *, dequantized: bool) -> dict[str, Tensor]:
    """The entries of a parameter's state in a file: whole tensors on the meta device."""
    shape = spec.shard.global_shape
    entries = replace(spec, shard=Shard(shape, shape)).new(torch.device("meta"))
    if dequantized:
        return {"step": entries["step"], **{m.name: torch.empty(shape, device="meta") for m in spec.moments}}
    return entries


def _check_format(path: str, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for option in STATE_FORMAT:
        if saved.get(option, group[option]) != group[option]:
            got = shown(saved[option])
            raise CheckpointError(
                f"{path}: got state saved with {option}={got}, expected {group[option]!r}; make the optimizer with "
                f"{option}={got}, or save with dequantize=True"
            )


def _check(path: str, file: SafetensorsReader, of: str, found: set[str], expected: Mapping[str, Tensor]) -> None:
    """Checks that a file has exactly the expected tensors.

    Raises:
        CheckpointError: the file lacks an expected tensor, has another tensor, or has one in another dtype or shape.
    """
    if found != expected.keys():
        raise CheckpointError(
            f"{path}: got {few(found - expected.keys()) or 'nothing else'} for {of}, expected "
            f"{few(expected.keys() - found) or 'none of it'}; load it into the model and optimizer that were saved"
        )
    for name, like in expected.items():
        stored = file.tensors[name]
        if (stored.shape, stored.dtype) != (tuple(like.shape), like.dtype):
            raise CheckpointError(
                f"{path}: got {named(name)} of shape {shown(stored.shape)} and {DTYPES[stored.dtype]}, expected "
                f"{tuple(like.shape)} and {DTYPES.get(like.dtype, like.dtype)}; load it into the model and "
                "optimizer that were saved"
            )


def _read_states(
    path: PathLike, file: SafetensorsReader, wanted: Mapping[int, _Wanted], names: Mapping[int, str]
) -> dict[int, StateDict]:
    """This rank's parts of the states, as the file has them."""
    states: dict[int, StateDict] = {}
    for index, (param, spec, entries) in wanted.items():
        own = spec.slices[0].spec
        floats = {moment.name: moment.signed for moment in spec.moments}
        states[index] = {}
        for key in entries:
            value = file.read(state_key(names[id(param)], key))
            if key in floats:
                with _naming(path):
                    check_moment(value, key, names[id(param)], signed=floats[key])
            grid = own.grid if own.is_scales(key) else None
            states[index][key] = value if key == "step" else sharded(spec.shard, value, grid)
    return states


def _read_model(file: SafetensorsReader, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts of the model's tensors."""
    return {name: part_of(shard_of(like), file.read(model_key(name))) for name, like in tensors.items()}


def _encoded(spec: TensorState, state: StateDict) -> StateDict:
    """A parameter's state in the form that the optimizer keeps. All ranks must call this."""
    if state.keys() == spec.state_names:
        return state
    return {"step": state["step"], **spec.encode(state)}  # float32 moments
