"""Loading a state dict: everything is checked, ranks agree, and only then the optimizer's own kind of state is made.

Ranks that exchange moments raise together: whatever only one of them may fail in, as its part is damaged or memory runs
out, stands in :func:`all_or_none`, and no collective does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from shardopt.layout import Exchange, FlatBuffer, FlatShard, UnknownShardError, assigned
from shardopt.optim.interface import OptimizerInterface
from shardopt.optim.internals import Internals
from shardopt.state.agreement import agreeing, all_or_none, on_any_rank
from shardopt.state.flat_encoding import encode_flat_moments
from shardopt.state.names import listed_name
from shardopt.state.options import PLACEMENT, STATE_FORMAT, check_options
from shardopt.state.slice_spec import StateDict
from shardopt.state.tensor_state import TensorState, tensor_state_of

#: In the param groups of a state dict: the elements of flat shards that it belongs to; see :func:`held_elements`.
HELD = "held_elements"

#: In the param groups of a state dict: what is not taken over.
_KEPT = frozenset([HELD, *PLACEMENT])


@dataclass
class Adopted:
    """State on its way through ``Optimizer.load_state_dict``, which would cast tensors to the parameter's dtype."""

    state: StateDict


class _Loaded(NamedTuple):
    """A parameter of the optimizer with what was loaded of it.

    Attributes:
        param: the parameter.
        index: its number in the state dict.
        name: how errors name it.
        spec: what its state is to look like.
        entries: its state in the state dict; None where it has none.
    """

    param: Tensor
    index: Any
    name: str
    spec: TensorState
    entries: Mapping[str, Any] | None


def adopt(internals: Internals, state_dict: StateDict) -> StateDict:
    """Turns a state dict into one with the optimizer's own kind of state; the optimizer is left as it is.

    Ranks that share parameters in flat shards, or in column shards, must all call this.

    Raises:
        ValueError: the state dict is not one for this optimizer, or the state is damaged, here or on another rank.
    """
    optimizer = internals.optimizer
    own = optimizer.param_groups
    try:
        exchanges = agreeing(param for group in own for param in group["params"])
    except UnknownShardError:
        saved, states = checked_containers(state_dict)
        if states:
            raise
        groups = merged_groups(optimizer, own, saved)
        return {**state_dict, "param_groups": groups}  # frameworks load the state of an optimizer that has none yet
    groups, loaded, is_own = all_or_none(exchanges, lambda: _read(internals, state_dict))
    _demand_own(exchanges, is_own)
    # Of torch, or dequantized: neither knows of low bits.
    of_torch = all("master_weight_bits" not in group for group in state_dict["param_groups"])
    all_or_none(exchanges, lambda: _check_entries(loaded, of_torch=of_torch))
    given = encode_flat_moments([each.spec for each in loaded], [each.entries for each in loaded], exchanges)
    loaded = [each._replace(entries=entries) for each, entries in zip(loaded, given, strict=True)]
    loaded, failure = _encode_cut_columns(loaded)
    state = all_or_none(exchanges, lambda: _adopted(internals, loaded, failure))
    return {**state_dict, "state": state, "param_groups": groups}


def _read(internals: Internals, state_dict: StateDict) -> tuple[list[dict[str, Any]], list[_Loaded], bool]:
    """The param groups as they are to be, and the parameters with their entries; checked as far as one rank can.

    Returns:
        The groups, the parameters, and whether the state is of the elements that this rank holds.
    """
    saved, states = checked_containers(state_dict)
    optimizer, is_own = internals.optimizer, True
    own = optimizer.param_groups
    groups = merged_groups(optimizer, own, saved)
    loaded = []
    for number, (saved_group, group, options) in enumerate(zip(saved, own, groups, strict=True)):
        for position, (index, param) in enumerate(zip(saved_group["params"], group["params"], strict=True)):
            spec = internals.state_of(param, options)  # as it will be: SGD's momentum says what state there is
            name = listed_name(group, number, position)
            entries = _kept_entries(optimizer, param, options, spec, checked_entries(states.get(index), name))
            loaded.append(_Loaded(param, index, name, spec, entries))
            with reading(name):
                optimizer.adopt_derived(options, saved_group, entries or {})
        held = held_elements(group["params"])
        with reading(f"param group {number}"):
            is_own &= held is None or saved_group.get(HELD) in (None, held)
    return groups, loaded, is_own


def _kept_entries(
    optimizer: OptimizerInterface,
    param: Tensor,
    group: Mapping[str, Any],
    spec: TensorState,
    entries: Mapping[str, Any] | None,
) -> Mapping[str, Any] | None:
    """The entries without those of moments that the optimizer would keep with other hyper-parameters."""
    off = tuple(moment for moment in optimizer.optional_moments if moment not in spec.moments)
    if not entries or not off:
        return entries
    left_out = {moment.name for moment in off} | (tensor_state_of(param, group, off).state_names - spec.state_names)
    return {key: value for key, value in entries.items() if key not in left_out}


def _demand_own(exchanges: Sequence[Exchange], is_own: bool) -> None:
    """Raises on all ranks if one was given the state of elements that it does not hold, as far as that can be seen."""
    if on_any_rank(exchanges, not is_own):  # all must know: the others would wait for one that gives up
        raise ValueError(
            f"got the state of other elements than {'another' if is_own else 'this'} rank's, expected what it itself "
            "saved, on as many ranks; save on each rank, or use shardopt.checkpoint, which loads on any"
        )


def _check_entries(loaded: Sequence[_Loaded], *, of_torch: bool) -> None:
    for each in loaded:
        if each.entries:
            with reading(each.name):
                each.spec.check_loaded(each.entries, each.name, of_torch=of_torch)


def _encode_cut_columns(loaded: Sequence[_Loaded]) -> tuple[list[_Loaded], Exception | None]:
    """Codes float moments where column shards cut blocks; all ranks gather them, one parameter at a time.

    A rank that fails to code its part goes on gathering, as the others wait for it.

    Returns:
        The parameters, and what this rank failed with.
    """
    _demand_alike(loaded)
    failure: Exception | None = None
    encoded = []
    for each in loaded:
        if not _is_gathered(each):
            encoded.append(each)
            continue
        assert each.entries is not None
        ((column_slice, moments),) = zip(each.spec.slices, each.spec.split_moments(each.entries), strict=True)
        whole = column_slice.spec.gather(moments)
        try:
            kept = {key: each.entries[key] for key in each.entries.keys() - {m.name for m in each.spec.moments}}
            codes = each.spec.join([column_slice.spec.encode_whole(whole)])
            encoded.append(each._replace(entries={**kept, **codes}))
        except Exception as error:  # the other ranks, which gather, must not wait for this one
            failure = error
    return encoded, failure


def _demand_alike(loaded: Sequence[_Loaded]) -> None:
    """Raises on all ranks if only some of them were given float moments that all would gather."""
    by_exchange: dict[Exchange, list[_Loaded]] = {}
    for each in loaded:
        holders = each.spec.shard.holders
        if holders is not None and each.spec.exchanges_columns:
            by_exchange.setdefault(holders, []).append(each)
    for exchange, cut in by_exchange.items():
        seen = torch.tensor(
            [[_is_gathered(each), not _is_gathered(each)] for each in cut], dtype=torch.int32, device="cpu"
        )
        exchange.all_reduce_max(seen)
        names = [each.name for each, both in zip(cut, seen.all(1).tolist(), strict=True) if both]
        if names:
            raise ValueError(
                f"{names[0]}: got float moments on some ranks only, expected them on all or on none; load what all "
                "ranks saved together"
            )


def _is_gathered(each: _Loaded) -> bool:
    """Whether a parameter has float moments to be coded in blocks that column shards cut."""
    return each.entries is not None and each.spec.exchanges_columns and each.spec.has_floats(each.entries)


def _adopted(internals: Internals, loaded: Sequence[_Loaded], failure: Exception | None) -> dict[Any, Any]:
    """The state of all parameters, where it is to live, with sound values.

    Args:
        internals: of the optimizer.
        loaded: its parameters.
        failure: raised, if there was one.
    """
    if failure is not None:
        raise failure
    state: dict[Any, Any] = {}
    for param, index, name, spec, entries in loaded:
        if entries:
            own = spec.adopt(entries, internals.residency.of(param).state, name)
            spec.check_local(own, name)
            state[index] = Adopted(own)
        elif entries is not None:
            state[index] = {}
    return state


def held_elements(params: Sequence[Tensor]) -> list[list[list[int]]] | None:
    """The elements of the model's parameters that this rank holds in flat shards: per tensor ``[start, end]`` of each.

    None where no shard is flat.
    """
    held = []
    for param in params:
        shard = assigned(param)
        shards = [segment.shard for segment in shard.segments] if isinstance(shard, FlatBuffer) else [shard]
        held.append([[flat.start, flat.end] for flat in shards if isinstance(flat, FlatShard)])
    return held if any(held) else None


def checked_containers(state_dict: object) -> tuple[Sequence[Mapping[str, Any]], Mapping[Any, Any]]:
    """The param groups and the parameters' state of a state dict.

    Raises:
        ValueError: there are none, or a param group is no dict with a list of parameters.
    """
    fields = state_dict if isinstance(state_dict, Mapping) else {}
    groups, states = fields.get("param_groups"), fields.get("state")
    if not _is_list(groups) or not isinstance(states, Mapping):
        raise ValueError(
            f"got a state dict with state as {type(states).__name__} and param_groups as {type(groups).__name__}, "
            "expected a dict and a list; load what state_dict() gives"
        )
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise ValueError(
                f"param group {number}: got {type(group).__name__}, expected a dict of options; load what state_dict() "
                "gives"
            )
        params = group.get("params")
        if not _is_list(params) or not all(isinstance(index, int | str) for index in params):
            raise ValueError(
                f"param group {number}: got params as {params!r:.80}, expected the parameters' numbers; load what "
                "state_dict() gives"
            )
    return groups, states


def checked_entries(entries: object, name: str) -> Mapping[str, Any] | None:
    """The entries of one parameter in a state dict, or None where it has none.

    Raises:
        ValueError: it is no dict.
    """
    if entries is None or (isinstance(entries, Mapping) and all(isinstance(key, str) for key in entries)):
        return entries
    raise ValueError(
        f"{name}: got its state as {entries!r:.80}, expected a dict of entries by name; load what state_dict() gives"
    )


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Inside, errors other than lack of memory become a ValueError that names what was read."""
    try:
        yield
    except (ValueError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of operators that damaged values do not have
        raise ValueError(
            f"{what}: got values that cannot be read ({type(error).__name__}: {error}), expected those that "
            "state_dict() gives; load an undamaged state"
        ) from error


def merged_groups(
    optimizer: OptimizerInterface, own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The param groups of a state dict, completed by the present options.

    Args:
        optimizer: checks hyper-parameters.
        own: the param groups that there are, of this optimizer or of one around it.
        saved: those of the state dict, which :func:`checked_containers` let pass.

    Raises:
        ValueError: they are of other parameters, of state in another format, or have options that are out of range.
    """
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in own]:
        raise ValueError(
            f"got a state dict with {[len(group['params']) for group in saved]} parameters per param group, "
            f"expected {[len(group['params']) for group in own]}"
        )
    groups = []
    for number, (saved_group, group) in enumerate(zip(saved, own, strict=True)):
        what = f"param group {number}"
        with reading(what):
            try:
                groups.append(_merged_group(optimizer, group, saved_group))
            except ValueError as error:
                raise ValueError(f"{what}: {error}") from None
    return groups


def _merged_group(optimizer: OptimizerInterface, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    for option in STATE_FORMAT:
        if saved.get(option, group[option]) != group[option]:
            raise ValueError(
                f"got state saved with {option}={saved[option]!r}, expected {group[option]!r}; make the optimizer with "
                f"{option}={saved[option]!r}, or go through state_dict(dequantize=True)"
            )
    rest = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    merged = {**rest, **{key: value for key, value in saved.items() if key not in _KEPT}}
    check_options(merged)
    optimizer.check_group(merged)
    return merged


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
