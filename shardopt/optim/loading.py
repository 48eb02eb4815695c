"""Loading a state dict: everything is checked, ranks agree, and only then the optimizer's own kind of state is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from shardopt.layout import UnknownShardError
from shardopt.optim.flat_state import (
    HELD,
    AnyState,
    all_or_none,
    check_flat_moments,
    encode_flat_moments,
    held_elements,
    on_any_rank,
)
from shardopt.optim.options import PLACEMENT, STATE_FORMAT, check_options
from shardopt.optim.planning import listed_name
from shardopt.optim.state import StateDict, local_entries

if TYPE_CHECKING:
    from shardopt.optim.base import ShardedOptimizer

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
    spec: AnyState
    entries: Mapping[str, Any] | None


def adopt(optimizer: ShardedOptimizer, state_dict: StateDict) -> StateDict:
    """Turns a state dict into one with the optimizer's own kind of state; the optimizer is left as it is.

    Ranks that share parameters in flat shards, or in column shards that cut blocks, must all call this.

    Raises:
        ValueError: the state dict is not one for this optimizer, or the state is damaged, here or on another rank.
    """
    params = [(group, param) for group in optimizer.param_groups for param in group["params"]]
    try:
        now = [optimizer.state_spec(param, group) for group, param in params]
    except UnknownShardError:
        if state_dict["state"]:
            raise
        groups = _merged_groups(optimizer, state_dict["param_groups"])
        return {**state_dict, "param_groups": groups}  # frameworks load the state of an optimizer that has none yet
    groups, loaded = all_or_none(now, lambda: _read(optimizer, state_dict))
    specs = [each.spec for each in loaded]
    _demand_own(optimizer, state_dict["param_groups"], specs)
    given = encode_flat_moments(specs, [each.entries for each in loaded])
    loaded = [each._replace(entries=entries) for each, entries in zip(loaded, given, strict=True)]
    # Of torch, or dequantized: neither knows of low bits.
    of_torch = all("master_weight_bits" not in group for group in state_dict["param_groups"])
    all_or_none(specs, lambda: _check_entries(loaded, of_torch=of_torch))
    places = optimizer.places
    state = {
        index: Adopted(spec.adopt(entries, places.place(param).state, name) if entries else {})
        for param, index, name, spec, entries in loaded
        if entries is not None
    }
    all_or_none(specs, lambda: _check_values(loaded, state))
    return {**state_dict, "state": state, "param_groups": groups}


def _demand_own(optimizer: ShardedOptimizer, saved: list[dict[str, Any]], specs: Sequence[AnyState]) -> None:
    """Raises on all ranks if one was given the state of elements that it does not hold, as far as that can be seen."""
    pairs = zip(saved, optimizer.param_groups, strict=True)
    held = [(group.get(HELD), held_elements(own["params"])) for group, own in pairs]
    is_own = all(here is None or there in (None, here) for there, here in held)
    if on_any_rank(specs, not is_own):  # all must know: the others would wait for one that gives up
        raise ValueError(
            f"got the state of other elements than {'another' if is_own else 'this'} rank's, expected what it itself "
            "saved, on as many ranks; save on each rank, or use shardopt.checkpoint, which loads on any"
        )


def _check_entries(loaded: Sequence[_Loaded], *, of_torch: bool) -> None:
    for each in loaded:
        if each.entries:
            each.spec.check_loaded(each.entries, each.name, of_torch=of_torch)


def _check_values(loaded: Sequence[_Loaded], state: Mapping[Any, Adopted]) -> None:
    for each in loaded:
        if each.entries:
            each.spec.check_local(local_entries(each.spec.shard, state[each.index].state), each.name)


def _read(optimizer: ShardedOptimizer, state_dict: StateDict) -> tuple[list[dict[str, Any]], list[_Loaded]]:
    """The param groups as they are to be, and the parameters with their entries; checked as far as one rank can."""
    saved, own = state_dict["param_groups"], optimizer.param_groups
    groups = _merged_groups(optimizer, saved)
    loaded = []
    for number, (saved_group, group, options) in enumerate(zip(saved, own, groups, strict=True)):
        for position, (index, param) in enumerate(zip(saved_group["params"], group["params"], strict=True)):
            spec = optimizer.state_spec(param, options)  # as it will be: SGD's momentum says what state there is
            name, entries = listed_name(group, number, position), state_dict["state"].get(index)
            check_flat_moments(spec, entries, name)
            loaded.append(_Loaded(param, index, name, spec, entries))
    return groups, loaded


def _merged_groups(optimizer: ShardedOptimizer, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The param groups of a state dict, completed by the optimizer's own options.

    Raises:
        ValueError: they are of other parameters, of state in another format, or have options that are out of range.
    """
    own = optimizer.param_groups
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in own]:
        raise ValueError(
            f"got a state dict with {[len(group['params']) for group in saved]} parameters per param group, "
            f"expected {[len(group['params']) for group in own]}"
        )
    groups = []
    for index, (saved_group, group) in enumerate(zip(saved, own, strict=True)):
        for option in STATE_FORMAT:
            if saved_group.get(option, group[option]) != group[option]:
                raise ValueError(
                    f"param group {index}: got state saved with {option}={saved_group[option]!r}, expected "
                    f"{group[option]!r}; make the optimizer with {option}={saved_group[option]!r}, or go through "
                    "state_dict(dequantize=True)"
                )
        rest = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**rest, **{k: v for k, v in saved_group.items() if k not in _KEPT}})
        try:
            check_options(groups[-1])
            optimizer.check_group(groups[-1])
        except ValueError as error:
            raise ValueError(f"param group {index}: {error}") from None
    return groups
