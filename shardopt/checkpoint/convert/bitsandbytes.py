"""State of bitsandbytes in files of torch.save: source only, as its optimizers read no names and no other blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.convert.recoding import checked, checked_step_count, forms
from shardopt.checkpoint.convert.state_dicts import check_groups, imported_groups, is_whole_tensor, names_by_group
from shardopt.checkpoint.convert.stream import (
    Checkpoint,
    LazyTensor,
    State,
    lazy,
    part_of_form,
    state_of_tensors,
)
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.foreign.bitsandbytes import Bitsandbytes, kinds_of
from shardopt.checkpoint.foreign.importing import is_ours
from shardopt.checkpoint.foreign.moments import CodedMoment
from shardopt.checkpoint.foreign.peer import Moments
from shardopt.checkpoint.groups import SavedGroup
from shardopt.checkpoint.wording import kind_of, line, named, shown
from shardopt.codec import Moment
from shardopt.state.slice_spec import SliceSpec, StateDict

_PEER = Bitsandbytes()

#: shardopt's classes by their moments.
_CLASSES = {
    ("exp_avg", "exp_avg_sq"): "AdamW",  # its Adam decays weights as AdamW, too
    ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq"): "AdEMAMix",
    ("exp_avg",): "Lion",
    ("momentum_buffer",): "SGD",
    ("square_avg",): "RMSprop",
    ("sum",): "Adagrad",
}


def is_bitsandbytes(states: Mapping[Any, Any]) -> bool:
    """Whether any parameter's state is of bitsandbytes."""
    return any(isinstance(state, Mapping) and _PEER.recognizes(state) for state in states.values())


def take_bitsandbytes(
    checkpoint: Checkpoint, model: Mapping[str, LazyTensor], state_dict: Mapping[str, Any], optimizer: str | None
) -> None:
    """Adds a model's tensors and the state of an optimizer of bitsandbytes to an empty checkpoint.

    Codes and scales stay as they are where ``import_state`` keeps them: in rows of whole blocks. Other moments are
    decoded, block by block. The param groups have ``codec="dynamic8"`` and the block size of bitsandbytes.

    Args:
        checkpoint: the checkpoint.
        model: parameters and buffers by name.
        state_dict: the optimizer's, whose structure was checked.
        optimizer: the optimizer's class; None to find it by hyper-parameters.

    Raises:
        CheckpointError: names are missing or ambiguous, or the state is damaged or of an unknown optimizer.
    """
    path, groups = checkpoint.path, state_dict["param_groups"]
    checkpoint.tensors |= {f"model.{name}": tensor for name, tensor in model.items()}
    check_groups(path, groups)
    try:
        states = {key: _PEER.unwrapped(state, {}, named(key)) for key, state in state_dict["state"].items() if state}
        _PEER.check_together(list(states.values()))
    except ValueError as error:
        raise CheckpointError(f"{path}: {line(error)}") from error
    kind = _kind(path, groups, states)
    stacked = "exp_avg_slow" in kind
    shaped = {key: _of_shape(state, stacked=stacked) for key, state in states.items()}
    names = names_by_group(path, groups, model, shaped)
    checkpoint.optimizer = optimizer or _CLASSES[kind]
    checkpoint.groups = imported_groups(checkpoint, groups, names, _PEER, [Moment(name, signed=True) for name in kind])
    keys = [key for group in groups for key in group["params"]]
    name_of = dict(zip(keys, (name for of_group in names for name in of_group), strict=True))
    in_floats = forms(checkpoint, checkpoint.groups, [name_of[key] for key in states])
    moments = {name_of[key]: _moments(state, in_floats[name_of[key]], name_of[key], path)
               for key, state in states.items()}  # fmt: skip
    coded = [each for of_name in moments.values() for each in of_name.values() if isinstance(each, CodedMoment)]
    if coded:
        options = {"codec": "dynamic8", "block_size": coded[0].block_size}
        checkpoint.groups = [_with_options(group, options) for group in checkpoint.groups]
    in_codes = forms(checkpoint, checkpoint.groups, list(moments))
    for key, state in states.items():
        name = name_of[key]
        step = checked_step_count(state.get("step", 1.0), name, path)
        found = _state(step, moments[name], in_codes[name], in_floats[name])
        checkpoint.states[name] = checked(found, name, path)


def _with_options(group: SavedGroup, options: Mapping[str, Any]) -> SavedGroup:
    return {**group, "options": {**group["options"], **options}}


def _of_shape(state: Mapping[str, Any], *, stacked: bool) -> dict[str, LazyTensor]:
    """The entry of a state that has the parameter's shape."""
    found = state.get("state1")
    if not is_whole_tensor(found):
        return {}
    assert isinstance(found, Tensor)
    return {"state1": lazy(found[0] if stacked and found.dim() and len(found) else found)}


def _kind(path: str, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of the moments: by the number of states and the hyper-parameters."""
    has_two = any("state2" in state for state in states.values())
    found = [
        kind for kind in kinds_of(groups[0].get("betas"), groups[0].get("eps", 0)) if ("exp_avg_sq" in kind) == has_two
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"{path}: got state of bitsandbytes with betas={shown(groups[0].get('betas'))} and "
            f"eps={shown(groups[0].get('eps'))}, expected those of one kind of optimizer, got {len(found)}; load it "
            "with shardopt.checkpoint.import_state"
        )
    return found[0]


def _moments(state: Mapping[str, Any], form: SliceSpec, name: str, path: str) -> Moments:
    """The moments of a parameter, in codes or floats, of its shape."""
    try:
        found = _PEER.moments(state, form.moments, f"{path}: {name}")
    except ValueError as error:
        raise CheckpointError(line(error)) from error
    for key, value in found.items():
        tensor = value.codes if isinstance(value, CodedMoment) else value
        if not is_whole_tensor(tensor) or tuple(tensor.shape) != form.shard.global_shape:
            raise CheckpointError(
                f"{path}: {name}: got {key} as {kind_of(tensor)} {shown(tuple(tensor.shape))}, expected a dense tensor "
                f"{shown(form.shard.global_shape)}; save it again"
            )
    return found


def _state(step: Tensor, moments: Moments, in_codes: SliceSpec, in_floats: SliceSpec) -> State:
    """The state in floats, and in the codes that it has, as far as these are shardopt's."""
    floats = state_of_tensors(in_floats, step, {key: _in_floats(value) for key, value in moments.items()})
    taken: dict[str, LazyTensor] = {}
    for moment in in_codes.moments if in_codes.codec.blockwise else ():
        value = moments[moment.name]
        if isinstance(value, CodedMoment) and is_ours(in_codes, moment, value):
            taken[in_codes.codes_name(moment)] = lazy(value.codes)
            taken[in_codes.scales_name(moment)] = lazy(value.scales.reshape(in_codes.grid.scales_shape(1)))
    codes = state_of_tensors(in_codes, step, taken)

    def read(first: int, end: int) -> StateDict:
        found = codes.read(first, end)
        if len(found) == len(in_codes.moment_entries):
            return found
        values = part_of_form(in_floats, first, end).decode(floats.read(first, end))
        return {**part_of_form(in_codes, first, end).encode_local(values), **found}

    sizes = {value.block_size for value in moments.values() if isinstance(value, CodedMoment)}
    stored = f"dynamic8 of bitsandbytes in blocks of {min(sizes)}" if sizes else None
    return floats._replace(coded=State(in_codes, step, read) if taken else None, stored=stored)


def _in_floats(value: Tensor | CodedMoment) -> LazyTensor:
    if not isinstance(value, CodedMoment):
        return LazyTensor(torch.float32, tuple(value.shape), lambda first, end: lazy(value).read(first, end).float())
    coded, size = value, value.block_size
    codes, numel = lazy(coded.codes), math.prod(value.codes.shape)

    def read(first: int, end: int) -> Tensor:
        begin, stop = first // size, -(-end // size)
        part = coded._replace(codes=codes.read(begin * size, min(stop * size, numel)), scales=coded.scales[begin:stop])
        return part.values()[first - begin * size : end - begin * size]

    return LazyTensor(torch.float32, codes.shape, read)
