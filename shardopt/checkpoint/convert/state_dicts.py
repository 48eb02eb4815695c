"""State dicts of a model and an optimizer, shardopt's own or another package's, as a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.contents import model_key
from shardopt.checkpoint.convert.recoding import (
    FLOAT32,
    add_states,
    checked,
    checked_step_count,
    class_defaults,
    class_named,
    class_of_entries,
    forms,
    made_optimizer,
)
from shardopt.checkpoint.convert.stream import Checkpoint, LazyTensor, State, lazy, part_of_form, state_of_tensors
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import SavedGroup, describe
from shardopt.checkpoint.importing import is_ours, taken_hyper
from shardopt.checkpoint.peers import package_of
from shardopt.checkpoint.peers.base import DERIVED, Peer
from shardopt.checkpoint.peers.coded import CodedMoment, ScaledMoment
from shardopt.checkpoint.peers.structure import check_structure, is_dense
from shardopt.checkpoint.peers.torchao import OptimState8bit
from shardopt.checkpoint.wording import few, kind_of, line, named, shown
from shardopt.state.options import DEFAULTS, STATE_FORMAT, is_own
from shardopt.state.slice_spec import SliceSpec, StateDict

#: Entries of one parameter's state: tensors and numbers, without entries that are None.
Entries = Mapping[str, Any]

_BY_NAME = (
    "make the optimizer with model.named_parameters(), load its state, and save it again: the state dict then has "
    "the names"
)


def take_state_dicts(
    checkpoint: Checkpoint,
    model: Mapping[str, LazyTensor],
    states: Mapping[Any, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    optimizer: str | None,
) -> None:
    """Adds a model's tensors and an optimizer's state to an empty checkpoint.

    State of shardopt stays as it is. Moments of other packages become float32 state of the class of the same kind, or
    stay in their codes where ``import_state`` keeps these: in rows of whole blocks. The param groups then have the
    codec and the block size of these codes.

    Args:
        checkpoint: the checkpoint.
        model: parameters and buffers by name.
        states: ``state`` of the optimizer's state dict; tensors may be :class:`LazyTensor`.
        groups: ``param_groups`` of the optimizer's state dict.
        optimizer: the optimizer's class; None to find it by options and entries.

    Raises:
        CheckpointError: names are missing or ambiguous, the state is of an unknown optimizer, or damaged.
    """
    path = checkpoint.path
    checkpoint.tensors |= {model_key(name): tensor for name, tensor in model.items()}
    check_groups(path, groups)
    names = _names_by_group(path, groups, model)
    keys = [key for group in groups for key in group["params"]]
    name_of = dict(zip(keys, (name for of_group in names for name in of_group), strict=True))
    strangers = states.keys() - name_of.keys()
    if strangers:
        raise CheckpointError(
            f"{path}: got state of {few(strangers)} in no param group, expected each in one; save it again"
        )
    kept = {key: {entry: x for entry, x in state.items() if x is not None} for key, state in states.items()}
    entries = {name_of[key]: state for key, state in kept.items() if state}
    if groups and all(is_own(group) for group in groups):
        checkpoint.groups = [describe(group, of_group) for group, of_group in zip(groups, names, strict=True)]
        tensors = {name: _own_entries(state, f"{path}: {name}") for name, state in entries.items()}
        checkpoint.optimizer = optimizer or class_of_entries(checkpoint, tensors)
        add_states(checkpoint, tensors)
    else:
        _take_foreign(checkpoint, entries, groups, names, optimizer)


def check_groups(path: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Checks that param groups are dicts of plain values.

    Raises:
        CheckpointError: one is not.
    """
    with _naming(path):
        hyper = {key for group in groups for key in group} - {"params", "param_names"}
        check_structure({"state": {}, "param_groups": groups}, hyper)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Raises an error about a content as a CheckpointError that names where the content is."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: {line(error)}") from error


def lazy_tensors(path: str, tensors: Mapping[Any, Any], what: str) -> dict[str, LazyTensor]:
    """Tensors as :class:`LazyTensor`.

    Raises:
        CheckpointError: a name is no text, or a value no dense tensor with all its elements in memory.
    """
    for key, value in tensors.items():
        if not isinstance(key, str) or not is_whole_tensor(value):
            raise CheckpointError(
                f"{path}: got {kind_of(value)} as {named(key)} of {what}, expected names and dense tensors; save "
                "state_dict() of a model whose tensors are whole"
            )
    return {key: lazy(tensor) for key, tensor in tensors.items()}


def is_whole_tensor(value: object) -> bool:
    """Whether a value is a plain dense tensor whose memory has an element for each index."""
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and is_dense(value)
        and value.numel() * value.itemsize <= value.untyped_storage().nbytes()
    )


def _lazy(value: Any, what: str) -> LazyTensor:
    """A tensor of a state, in memory or not, or a number.

    Raises:
        CheckpointError: the value is neither.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = torch.tensor(float(value), device="cpu")
    if is_whole_tensor(value):
        return lazy(value)
    if not isinstance(value, LazyTensor):
        raise CheckpointError(
            f"{what} as {kind_of(value)}, expected a dense tensor with all its elements, or a number; save it again"
        )
    return value


def _own_entries(state: Entries, what: str) -> dict[str, LazyTensor]:
    """The entries of a state of shardopt, without entries that follow from others."""
    return {key: _lazy(value, f"{what}: got {named(key)}") for key, value in state.items() if key not in DERIVED}


def _names_by_group(path: str, groups: Sequence[Mapping[str, Any]], model: Mapping[str, LazyTensor]) -> list[list[str]]:
    """The names of each param group's parameters.

    Raises:
        CheckpointError: they cannot be told, or the model has no such parameters.
    """
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        names = [list(group["params"]) for group in groups]
    elif all("param_names" in group for group in groups):
        for names_of in (group["param_names"] for group in groups):
            if not isinstance(names_of, list | tuple) or not all(isinstance(name, str) for name in names_of):
                raise CheckpointError(f"{path}: got param_names as {shown(names_of)}, expected names; save it again")
        names = [list(group["param_names"]) for group in groups]
        if any(len(of_group) != len(group["params"]) for of_group, group in zip(names, groups, strict=True)):
            raise CheckpointError(f"{path}: got param_names of other parameters than params, expected as many")
    else:
        names = [_names_by_order(path, groups, model)]
    flat = [name for of_group in names for name in of_group]
    unknown = [name for name in flat if name not in model]
    if unknown or len(set(flat)) < len(flat):
        raise CheckpointError(
            f"{path}: got an optimizer of {few(unknown) or 'parameters that it has twice'}, expected each once, and in "
            "the model; save model and optimizer of one run"
        )
    return names


def _names_by_order(path: str, groups: Sequence[Mapping[str, Any]], model: Mapping[str, LazyTensor]) -> list[str]:
    """The names of the model's tensors in floats, if a single param group has as many parameters.

    Their shapes are compared with the moments' afterwards.
    """
    if len(groups) != 1:
        raise CheckpointError(
            f"{path}: got {len(groups)} param groups without param_names, expected names, as the order of the "
            f"parameters does not tell them; {_BY_NAME}"
        )
    keys = groups[0]["params"]
    names = [name for name, tensor in model.items() if tensor.dtype.is_floating_point]
    if len(keys) != len(names):
        raise CheckpointError(
            f"{path}: got {len(keys)} parameters without param_names and a model of {len(names)} tensors in floats, "
            f"expected as many, in the same order; {_BY_NAME}"
        )
    return names


def _take_foreign(
    checkpoint: Checkpoint,
    states: Mapping[str, Entries],
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    optimizer: str | None,
) -> None:
    """Adds another package's state, by the parameters' names, to a checkpoint that has the model's tensors."""
    path = checkpoint.path
    group_of = {name: group for group, of_group in zip(groups, names, strict=True) for name in of_group}
    with _naming(path):
        peer = package_of(states.values())
        for name, state in states.items():
            _check_whole(state, f"{path}: {name}", may_be_lazy=peer.codec is None)
        states = {name: peer.unwrapped(state, group_of[name], name) for name, state in states.items()}
        peer.check_together(states.values())
        moments = peer.moment_names(states.values(), groups)
        checkpoint.optimizer = optimizer or peer.class_name(moments, groups)
    checkpoint.groups = _imported_groups(checkpoint, groups, names, peer, moments, states)
    in_floats = forms(checkpoint, checkpoint.groups, list(states))
    found = {name: _moments(peer, state, in_floats[name], name, path) for name, state in states.items()}
    coded = next((x for of_name in found.values() for x in of_name.values() if isinstance(x, CodedMoment)), None)
    if coded is not None:
        options = {"codec": peer.codec, "block_size": coded.block_size}
        checkpoint.groups = [{**group, "options": {**group["options"], **options}} for group in checkpoint.groups]
    in_codes = forms(checkpoint, checkpoint.groups, list(states))
    for name, state in states.items():
        step = state.get("step", 1.0)  # without a step count, as torch's SGD, an optimizer has taken a step
        step = step.whole() if isinstance(step, LazyTensor) and step.numel == 1 else step
        converted = _state(peer, checked_step_count(step, name, path), found[name], in_codes[name], in_floats[name])
        checkpoint.states[name] = checked(converted, name, path)
    left_out = {key for state in states.values() for key in state} & peer.extra
    checkpoint.left_out += [f"{key} of the state" for key in sorted(left_out)]


def _check_whole(state: Entries, what: str, *, may_be_lazy: bool) -> None:
    """Raises if a tensor of a state has no memory for each index, or is lazy and may not be."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            _check_whole(value, what, may_be_lazy=may_be_lazy)
        parts = [getattr(value, name) for name in value.__slots__] if isinstance(value, OptimState8bit) else [value]
        for part in parts:
            if isinstance(part, LazyTensor) and not may_be_lazy:
                raise CheckpointError(
                    f"{what}: got codes of another package in a folder of torch.distributed.checkpoint, expected "
                    "moments in floats; load it, and pass the state dict to shardopt.checkpoint.import_state"
                )
            if isinstance(part, Tensor) and not is_whole_tensor(part):
                raise CheckpointError(
                    f"{what}: got {named(key)} as {kind_of(part)}, expected a dense tensor with all its elements; "
                    "save it again"
                )


def _moments(peer: Peer, state: Entries, form: SliceSpec, name: str, path: str) -> dict[str, LazyTensor | CodedMoment]:
    """The moments of a parameter, in codes or floats, of its shape."""
    with _naming(path):
        values = peer.moments(state, form.moments, name)
    moments: dict[str, LazyTensor | CodedMoment] = {}
    for key, value in values.items():
        if isinstance(value, ScaledMoment):
            moments[key] = _scaled(_lazy(value.floats, f"{path}: {name}: got {key}"), value.factor)
        else:
            moments[key] = value if isinstance(value, CodedMoment) else _lazy(value, f"{path}: {name}: got {key}")
    for key, moment in moments.items():
        tensor = moment.codes if isinstance(moment, CodedMoment) else moment
        is_float = isinstance(moment, CodedMoment) or tensor.dtype.is_floating_point
        if not is_float or tuple(tensor.shape) != form.shard.global_shape:
            raise CheckpointError(
                f"{path}: {name}: got {key} of {tensor.dtype} {shown(tuple(tensor.shape))}, expected floats "
                f"{shown(form.shard.global_shape)}; save model and optimizer of one run. If the parameters have no "
                f"names: {_BY_NAME}"
            )
    return moments


def _state(
    peer: Peer,
    step: Tensor,
    moments: Mapping[str, LazyTensor | CodedMoment],
    in_codes: SliceSpec,
    in_floats: SliceSpec,
) -> State:
    """The state in floats, and in the codes of the source, as far as these are shardopt's."""
    floats = state_of_tensors(in_floats, step, {key: _in_floats(value) for key, value in moments.items()})
    taken: dict[str, LazyTensor] = {}
    for moment in in_codes.moments if in_codes.codec.blockwise else ():
        value = moments[moment.name]
        if isinstance(value, CodedMoment) and is_ours(in_codes, moment, value):
            taken[in_codes.codes_name(moment)] = lazy(value.codes)
            taken[in_codes.scales_name(moment)] = lazy(value.scales.reshape(in_codes.grid.scales_shape(1)))
    codes = state_of_tensors(in_codes, step, taken)

    def read(first: int, end: int) -> StateDict:
        entries = codes.read(first, end)
        if len(entries) == len(in_codes.moment_entries):
            return entries
        values = part_of_form(in_floats, first, end).decode(floats.read(first, end))
        return {**part_of_form(in_codes, first, end).encode_local(values), **entries}

    sizes = {value.block_size for value in moments.values() if isinstance(value, CodedMoment)}
    stored = f"{peer.codec} of {peer.name} in blocks of {min(sizes)}" if sizes else None
    return floats._replace(coded=State(in_codes, step, read) if taken else None, stored=stored)


def _scaled(floats: LazyTensor, factor: float) -> LazyTensor:
    return floats._replace(read=lambda first, end: floats.read(first, end) * factor)


def _in_floats(moment: LazyTensor | CodedMoment) -> LazyTensor:
    if isinstance(moment, LazyTensor):
        return LazyTensor(torch.float32, moment.shape, lambda first, end: moment.read(first, end).float())
    coded, size = moment, moment.block_size
    codes, numel = lazy(coded.codes), math.prod(coded.codes.shape)

    def read(first: int, end: int) -> Tensor:
        begin, stop = first // size, -(-end // size)
        part = coded._replace(codes=codes.read(begin * size, min(stop * size, numel)), scales=coded.scales[begin:stop])
        return part.values()[first - begin * size : end - begin * size]

    return LazyTensor(torch.float32, codes.shape, read)


def _scalars(entries: Entries) -> dict[str, Any]:
    """The step count and what follows from it, of state that has both."""
    if entries.keys().isdisjoint(DERIVED):
        return {}
    values = {key: entries[key] for key in ("step", *DERIVED) if entries.get(key) is not None}
    return {key: x.whole() if isinstance(x, LazyTensor) else x for key, x in values.items()}


def _imported_groups(
    checkpoint: Checkpoint,
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    peer: Peer,
    moments: Sequence[str],
    states: Mapping[str, Entries],
) -> list[SavedGroup]:
    """Param groups of float32 state with the hyper-parameters that the class has, as import_state takes them over.

    Args:
        checkpoint: has the parameters and the name of the class.
        groups: the other package's.
        names: the names of each group's parameters.
        peer: the other package.
        moments: the names of the state's moments, which tell the meaning of hyper-parameters.
        states: the state of each parameter, of which a group may keep what follows from the step count.

    Raises:
        CheckpointError: the hyper-parameters are of another optimizer, or out of range.
    """
    kind = class_named(checkpoint.optimizer, checkpoint.path)
    own_keys = class_defaults(kind).keys() - DEFAULTS.keys() | {"maximize", "initial_lr"}
    saved = []
    for group, params in zip(groups, names, strict=True):
        with _naming(checkpoint.path):
            hyper = peer.hyper({**group, "params": ()}, moments)
        described = describe({key: value for key, value in hyper.items() if key in own_keys}, params)
        saved.append({**described, "options": {**described["options"], **FLOAT32}})
    optimizer = made_optimizer(kind, saved, checkpoint)
    converted = []
    for index, (group, own_group, params) in enumerate(zip(groups, optimizer.param_groups, names, strict=True)):
        hyper = {key: value for key, value in group.items() if key not in ("params", "param_names", *STATE_FORMAT)}
        with _naming(f"{checkpoint.path}: param group {index}"):
            taken, left_out = taken_hyper(optimizer, own_group, hyper, peer)
            options = {**own_group, **taken}
            for name in params:
                optimizer.adopt_derived(options, group, _scalars(states.get(name, {})))
            optimizer.check_group(options)
        checkpoint.left_out += [f"{key}={shown(value)} of param group {index}" for key, value in left_out.items()]
        converted.append(describe(options, params))
    return converted
