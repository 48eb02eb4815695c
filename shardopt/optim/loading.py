"""Loads a state dict: checks all entries, lets ranks agree that all can load, and quantizes to the optimizer's format.

If loading fails on one rank, all ranks that share its shards raise, so that none hangs in a collective: code that may
fail on a single rank, by damaged data or lack of memory, runs in :func:`all_or_none`; collectives run outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from shardopt.layout import (
    FlatBuffer,
    FlatShard,
    RankGroup,
    UnknownShardError,
    all_or_none,
    all_reduce_any,
    assigned,
    meet,
    shard_of,
)
from shardopt.layout.names import bare_name
from shardopt.optim.interface import OptimizerInterface
from shardopt.optim.internals import Internals
from shardopt.removed import OPTIONS
from shardopt.state.encoding import encode_loaded
from shardopt.state.names import param_name
from shardopt.state.options import PLACEMENT, STATE_FORMAT, check_options, convert_sequences
from shardopt.state.packed import unpack_loaded
from shardopt.state.slice_spec import ROW_MOMENTS, StateDict
from shardopt.state.tensor_spec import TensorSpec, tensor_spec_of

#: Key in a state dict's param groups for the ranges of flat shards that it has state of; see :func:`flat_ranges`.
HELD_ELEMENTS = "held_elements"
#: Attribute of DTensors in a state dict for the part that this rank holds, which torch.save keeps: a rank that loads
#: another rank's file would take its part for its own. torch.distributed.checkpoint loads into this rank's tensors.
_HELD_INDICES = "shardopt_held_indices"

#: Key in a state dict's param groups for the names of moments in packed state; see :func:`packed_moments`.
PACKED_MOMENTS = "packed_moments"

#: Keys in a state dict's param groups that loading does not copy to the optimizer's param groups.
_NOT_MERGED = frozenset([HELD_ELEMENTS, PACKED_MOMENTS, *PLACEMENT, *OPTIONS])


@dataclass
class WrappedState:
    """Hides loaded tensors from ``Optimizer.load_state_dict``, which would cast them to the parameter's dtype."""

    state: StateDict


class _LoadedParameter(NamedTuple):
    """A parameter of the optimizer, and its entries in the state dict that is loaded."""

    param: Tensor
    index: Any  # its number in the state dict
    name: str  # in errors
    spec: TensorSpec  # of the state after loading
    entries: Mapping[str, Any] | None  # its state in the state dict, if that has one


class _Matched(NamedTuple):
    """A state dict beside the optimizer that loads it."""

    groups: list[dict[str, Any]]  # param groups with the loaded options
    parameters: list[_LoadedParameter]
    is_of_this_rank: bool  # whether flat shards had the same ranges when they were saved


def loading_ranks(params: Iterable[Tensor]) -> list[RankGroup]:
    """The groups of ranks with flat or column shards of the same parameter: all of a group must load, or all raise.

    Raises UnknownShardError if nothing says what shard a parameter is.
    """
    holders = [shard.holders for shard in map(shard_of, params) if shard.cuts_rows]
    return list(dict.fromkeys(group for group in holders if group is not None))


def convert_state_dict(internals: Internals, state_dict: StateDict) -> StateDict:
    """Collective: converts a state dict to the optimizer's options, codec and devices; does not change the optimizer.

    Ranks that share parameters in flat shards, or in column shards, must all call this. Raises ValueError if the state
    dict is not one for this optimizer, or the state is damaged, here or on another rank.
    """
    optimizer = internals.optimizer
    try:
        rank_groups = loading_ranks(param for group in optimizer.param_groups for param in group["params"])
    except UnknownShardError:
        saved, states = checked_containers(state_dict)
        if states:
            raise
        groups = merged_groups(optimizer, optimizer.param_groups, reorder_groups(saved, optimizer.param_groups))
        return {**state_dict, "param_groups": groups}  # frameworks load what an optimizer saved before its first step
    meet(rank_groups, "load_state_dict")
    groups, loaded, is_of_this_rank = all_or_none(rank_groups, lambda: _match(internals, state_dict))
    if all_reduce_any(rank_groups, not is_of_this_rank):  # else the others would wait for the ranks that raise
        whose = "another" if is_of_this_rank else "this"
        raise ValueError(
            f"got the state of other elements than {whose} rank's, expected what it itself saved, on as many ranks; "
            "save on each rank, or use shardopt.checkpoint, which loads on any"
        )
    specs, names = [item.spec for item in loaded], [item.name for item in loaded]
    entries = unpack_loaded(specs, [item.entries for item in loaded], names, rank_groups)
    # State of torch, or dequantized state: neither has low bits.
    may_lack_low_bits = all("master_weight_bits" not in group for group in state_dict["param_groups"])

    def check_entries() -> None:
        for spec, of_param, name in zip(specs, entries, names, strict=True):
            if of_param:
                with as_value_error(name):
                    spec.check_loaded(of_param, name, may_lack_low_bits=may_lack_low_bits)

    def convert_entries() -> dict[Any, Any]:
        state: dict[Any, Any] = {}
        for (param, index, name, spec, _), of_param in zip(loaded, encoded, strict=True):
            if of_param:
                adopted = spec.state_from_loaded(of_param, internals.residency.decide(param).state_device, name)
                spec.check_values(adopted, name)
                state[index] = WrappedState(adopted)
            elif of_param is not None:  # the state dict has an empty dict for the parameter, which stays one
                state[index] = {}
        return state

    all_or_none(rank_groups, check_entries)
    encoded = encode_loaded(specs, entries, names, rank_groups)
    return {**state_dict, "state": all_or_none(rank_groups, convert_entries), "param_groups": groups}


def _match(internals: Internals, state_dict: StateDict) -> _Matched:
    """Matches a state dict to the optimizer's parameters, and makes the checks that need no other rank."""
    saved, states = checked_containers(state_dict)
    optimizer, is_of_this_rank = internals.optimizer, True
    saved = reorder_groups(saved, optimizer.param_groups)
    groups = merged_groups(optimizer, optimizer.param_groups, saved)
    loaded: list[_LoadedParameter] = []
    for number, (saved_group, group, options) in enumerate(zip(saved, optimizer.param_groups, groups, strict=True)):
        specs = [internals.state_of(param, options) for param in group["params"]]  # by the loaded options
        for position, (index, param) in enumerate(zip(saved_group["params"], group["params"], strict=True)):
            spec, name = specs[position], param_name(group, number, position)
            entries = checked_entries(states.get(index), name)
            unneeded = tuple(moment for moment in optimizer.optional_moments if moment not in spec.moments)
            if entries and unneeded:  # saved with other hyper-parameters
                left_out = tensor_spec_of(param, options, unneeded).entries.keys() - spec.entries.keys()
                left_out |= {moment.name for moment in unneeded}  # entries of torch, or dequantized ones
                entries = {key: value for key, value in entries.items() if key not in left_out}
            marked = [
                getattr(entry, _HELD_INDICES) for entry in (entries or {}).values() if hasattr(entry, _HELD_INDICES)
            ]
            is_of_this_rank &= all(indices == shard_of(param).indices for indices in marked)
            loaded.append(_LoadedParameter(param, index, name, spec, entries))
        with as_value_error(f"param group {number}"):
            expected = packed_moments(specs)
            got = saved_group.get(PACKED_MOMENTS, expected)
            if got != expected:  # the bytes of packed state would be taken for those of other moments
                raise ValueError(
                    f"param group {number}: got packed state of the moments {got!r:.80}, expected {expected}; load the "
                    "state into an optimizer of the class that saved it"
                )
            ranges = flat_ranges(group["params"])
            saved_ranges = saved_group.get(HELD_ELEMENTS)  # None if the state was not saved from flat shards
            is_of_this_rank &= ranges is None or saved_ranges is None or saved_ranges == ranges
    return _Matched(groups, loaded, is_of_this_rank)


def packed_moments(specs: Iterable[TensorSpec]) -> list[str]:
    """The sorted names of the moments of some tensors, saved beside packed state, whose bytes do not name them."""
    names: set[str] = set()
    for spec in specs:
        names.update(moment.name for moment in spec.moments)
        if ROW_MOMENTS in spec.entries:
            names.add(ROW_MOMENTS)
    return sorted(names)


def flat_ranges(params: Sequence[Tensor]) -> list[list[list[int]]] | None:
    """Per parameter, the ranges ``[start, end]`` of this rank's flat shards (FSDP1, DeepSpeed); None without any."""
    ranges = []
    for param in params:
        shard = assigned(param)
        shards = [segment.shard for segment in shard.segments] if isinstance(shard, FlatBuffer) else [shard]
        ranges.append([[flat.start, flat.end] for flat in shards if isinstance(flat, FlatShard)])
    return ranges if any(ranges) else None


def mark_held_indices(param: Tensor, state: object) -> None:
    """Marks the DTensors in a parameter's state with the part that this rank holds; see ``_HELD_INDICES``."""
    for entry in state.values() if isinstance(state, Mapping) else ():  # a hook may have put something else
        if isinstance(entry, Tensor) and type(entry) is not Tensor:
            setattr(entry, _HELD_INDICES, shard_of(param).indices)


def checked_containers(state_dict: object) -> tuple[Sequence[Mapping[str, Any]], Mapping[Any, Any]]:
    """A state dict's ``param_groups`` and ``state``; ValueError if one lacks, or a group has no list of parameters."""
    fields = state_dict if isinstance(state_dict, Mapping) else {}
    groups, states = fields.get("param_groups"), fields.get("state")
    if not _is_list(groups) or not isinstance(states, Mapping):
        raise ValueError(
            f"got a state dict with state as {type(states).__name__} and param_groups as {type(groups).__name__}, "
            "expected a dict and a list; load what state_dict() gives"
        )
    for number, group in enumerate(groups):
        params = group.get("params") if isinstance(group, Mapping) else None
        if not _is_list(params) or not all(isinstance(index, int | str) for index in params):
            raise ValueError(
                f"param group {number}: got a {type(group).__name__} with params {params!r:.80}, expected a dict with "
                "the parameters' numbers; load what state_dict() gives"
            )
    return groups, states


def checked_entries(entries: object, name: str) -> Mapping[str, Any] | None:
    """A parameter's entries in a state dict, or None; ValueError if they are no dict with text keys."""
    if entries is None or (isinstance(entries, Mapping) and all(isinstance(key, str) for key in entries)):
        return entries
    raise ValueError(
        f"{name}: got its state as {entries!r:.80}, expected a dict of entries by name; load what state_dict() gives"
    )


def reorder_groups(saved: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Reorders the parameters in a state dict's param groups as the optimizer has them, and drops ``param_names``.

    Parameters are matched by name if both the state dict and the optimizer have names, otherwise by position. Raises
    ValueError if the groups have other numbers of parameters, or parameters of other names.
    """
    got, expected = ([len(group["params"]) for group in side] for side in (saved, present))
    if got != expected:
        raise ValueError(
            f"got a state dict with {got} parameters per param group, expected {expected}; make the optimizer with the "
            "same param groups"
        )
    groups: list[Mapping[str, Any]] = []
    for number, (saved_group, group) in enumerate(zip(saved, present, strict=True)):
        indices, names = saved_group["params"], _names_of(group, group.get("param_names"))
        # torch's get_optimizer_state_dict puts names in place of numbers, which set_optimizer_state_dict reorders, but
        # not param_names along with them: the order is that of the names in ``params``.
        is_named = all(isinstance(index, str) for index in indices)
        saved_names = _names_of(saved_group, indices if is_named else saved_group.get("param_names"))
        order = list(range(len(indices)))
        if names is not None and saved_names is not None and names != saved_names:
            if sorted(names) == sorted(saved_names) and len(set(names)) == len(names):
                position_of = {name: position for position, name in enumerate(saved_names)}
                order = [position_of[name] for name in names]
            elif not is_named:
                others = ", ".join(sorted(set(saved_names) - set(names))[:4])
                missing = ", ".join(sorted(set(names) - set(saved_names))[:4])
                raise ValueError(
                    f"param group {number}: got state of {others or 'other names'}, expected {missing or names}; make "
                    "the optimizer with the parameters that were saved, or take param_names out of the state dict's "
                    "param groups to load by position"
                )
        with as_value_error(f"param group {number}"):
            per_parameter = [key for key in ("params", HELD_ELEMENTS) if saved_group.get(key)]
            reordered = {key: [saved_group[key][position] for position in order] for key in per_parameter}
        groups.append({**{key: x for key, x in saved_group.items() if key != "param_names"}, **reordered})
    return groups


def _names_of(group: Mapping[str, Any], names: Any) -> list[str] | None:
    """``names`` without prefixes of wrappers such as DDP; None unless there is a string per parameter of the group."""
    if not _is_list(names) or len(names) != len(group["params"]) or not all(isinstance(name, str) for name in names):
        return None
    return [bare_name(name) for name in names]


@contextmanager
def as_value_error(what: str) -> Iterator[None]:
    """Turns errors inside the block, except lack of memory, into a ValueError that names the part being read."""
    try:
        yield
    except (ValueError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damaged values may fail in any operator
        raise ValueError(
            f"{what}: got values that cannot be read ({type(error).__name__}: {error}), expected those that "
            "state_dict() gives; load an undamaged state"
        ) from error


def merged_groups(
    optimizer: OptimizerInterface, present: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Merges options: those of the state dict's param groups (from :func:`reorder_groups`) override the present ones.

    ``present`` may also be the param groups of an optimizer that wraps ``optimizer``. Raises ValueError if the state
    was saved in another format (codec, block size), or options are out of range.
    """
    groups = []
    for number, (saved_group, group) in enumerate(zip(saved, present, strict=True)):
        what = f"param group {number}"
        with as_value_error(what):
            try:
                _check_format(group, saved_group)
                rest = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                merged = {**rest, **{key: value for key, value in saved_group.items() if key not in _NOT_MERGED}}
                convert_sequences(merged)
                check_options(merged)
                optimizer.check_group(merged)
            except ValueError as error:
                raise ValueError(f"{what}: {error}") from None
        groups.append(merged)
    return groups


def _check_format(group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises ValueError if codes of the saved param group would be decoded in another way than they were encoded."""
    for option in STATE_FORMAT:
        if saved.get(option, group[option]) != group[option]:
            raise ValueError(
                f"got state saved with {option}={saved[option]!r}, expected {group[option]!r}; make the optimizer with "
                f"{option}={saved[option]!r}, or go through state_dict(dequantize=True)"
            )
    if saved.get(HELD_ELEMENTS) and saved.get("exact_cut_blocks") is False:
        raise ValueError(
            "got state of flat shards saved with exact_cut_blocks=False by an earlier version, expected one scale per "
            "block; save a portable checkpoint with that version, and load that"
        )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
