"""State dicts: quantized ones, and conversions from and to those of the bare optimizer."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.optim.loading import HELD, by_name, checked_entries, held_elements
from shardopt.state.loaded_entries import check_dense, check_entry, check_moment, copy_to
from shardopt.state.names import listed_name
from shardopt.state.options import is_own
from shardopt.wrapper.chunks import TransferUnit, is_bare
from shardopt.wrapper.coding import CODING_ENDS, DTYPE, State, coded_names, coding_keys, decoded, encoded, placed
from shardopt.wrapper.entries import CODED_DTYPES, Entries

#: Options in the param groups of a state dict, without which codes cannot be decoded.
_FORMAT = ("codec", "block_size", "min_quantized_numel")

#: Key in the param groups of a state dict: the names of all entries that are never below zero, alike on all ranks.
UNSIGNED = "unsigned"

_BY_ENTRY = " by entry"


class Whole:
    """A state entry on its way through ``Optimizer.load_state_dict``, which would cast it to the parameter's dtype."""

    def __init__(self, value: Any) -> None:
        self.value = value


def unwrapped(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state with every :class:`Whole` replaced by its value."""
    return {key: value.value if isinstance(value, Whole) else value for key, value in state.items()}


def format_of(entries: Entries) -> dict[str, Any]:
    """The options in the param groups of a state dict.

    The codec's name differs from that in state of shardopt's optimizers, which code some moments in units of others.
    """
    options = {option: entries.options[option] for option in _FORMAT}
    return {**options, "codec": f"{entries.options['codec']}{_BY_ENTRY}", UNSIGNED: sorted(entries.unsigned)}


def is_quantized(options: Container[str]) -> bool:
    """Whether the options of a param group in a state dict are those of quantize_state."""
    return all(option in options for option in (*_FORMAT, UNSIGNED))


def codec_name(saved: object) -> str | None:
    """The codec that :func:`format_of` names; None if it names none."""
    return saved.removesuffix(_BY_ENTRY) if isinstance(saved, str) and saved.endswith(_BY_ENTRY) else None


def dequantized(state_dict: State, entries: Entries, units: Sequence[TransferUnit]) -> State:
    """The state dict of the bare optimizer, for one of quantized state without a format. Shares no memory with it."""
    saved, states = state_dict["param_groups"], state_dict["state"]
    bare: dict[Any, State] = {}
    for unit in units:
        index = saved[unit.group]["params"][unit.position]
        if index in states:
            state = unit.state_in(states[index])
            floats = {key: _copied(x) if key in state else x for key, x in decoded(entries, unit, state).items()}
            unit.add_to_bare(bare.setdefault(index, {}), floats)
    return {**state_dict, "state": {**states, **bare}}


def adopted(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    entries: Entries,
    chunks: Sequence[Sequence[TransferUnit]],
) -> tuple[State, dict[Tensor, State]]:
    """A state dict with quantized state, for one of either kind. Ranks that share cut blocks must all call this.

    Args:
        state_dict: the state dict, checked by :func:`shardopt.optim.loading.checked_containers`.
        groups: the optimizer's param groups.
        entries: decides which entries are quantized; learns the entries that the state dict has in full.
        chunks: the optimizer's tensors.

    Returns:
        The state dict for the inner optimizer, and the state of flat tensors, which the inner optimizer cannot load.

    Raises:
        ValueError: the state was quantized in another way, is damaged, or is of other parameters.
    """
    saved, states = by_name(state_dict["param_groups"], groups), state_dict["state"]
    quantized = all(_has_format(group, entries) for group in saved)
    other_elements = _other_elements(groups, saved) if quantized else None
    loaded: dict[Tensor, State] = {}
    flat: dict[Tensor, State] = {}
    for chunk in chunks:
        coded: list[State] = [{} for _ in chunk]
        floats: list[State | None] = [None] * len(chunk)
        failure: Exception | None = other_elements
        try:
            for at, unit in enumerate(chunk if failure is None else ()):
                index = saved[unit.group]["params"][unit.position]
                name = listed_name(groups[unit.group], unit.group, unit.position)
                state = _state_of(unit, checked_entries(states.get(index), name), name, quantized=quantized)
                if state:
                    signs = saved[unit.group][UNSIGNED] if quantized else None
                    coded[at], floats[at] = _checked(entries, unit, state, name, signs)
        except ValueError as error:
            failure = error
        new = encoded(entries, chunk, floats, coded, failure)
        for unit, codes, encoded_state in zip(chunk, coded, new, strict=True):
            if encoded_state is None:
                continue
            state = {**encoded_state, **codes}
            if unit.segment is None:
                unit.put_state(loaded, _boxed(unit, state))
            else:
                coding, options = coding_keys(state), saved[unit.group]
                moved = {key: x if key in coding else on_device(unit, options, key, x) for key, x in state.items()}
                unit.put_state(flat, moved)
    index_of = {
        param: index
        for group, saved_group in zip(groups, saved, strict=True)
        for param, index in zip(group["params"], saved_group["params"], strict=True)
    }
    added = {*_FORMAT, UNSIGNED, HELD} if quantized else set()
    flat_indices = {index_of[unit.param] for chunk in chunks for unit in chunk if unit.segment is not None}
    others = {index: state for index, state in states.items() if index not in flat_indices}
    for_inner = {
        **state_dict,
        "state": {**others, **{index_of[param]: state for param, state in loaded.items()}},
        "param_groups": [{key: value for key, value in group.items() if key not in added} for group in saved],
    }
    return for_inner, flat


def _state_of(unit: TransferUnit, state: Mapping[str, Any] | None, name: str, *, quantized: bool) -> State | None:
    """The unit's entries in the state of its tensor in a state dict.

    Raises:
        ValueError: the state of a flat tensor is of other parameters.
    """
    if not state:
        return None
    if quantized and unit.segment is not None and (is_bare(state) or unit.segment.name not in state):
        has_elements = unit.local.numel() > 0
        if is_bare(state) or has_elements:
            raise ValueError(
                f"{name}: got state of {', '.join(map(str, state)):.160}, expected state of {unit.segment.name}; load "
                "a state dict of this model, sharded alike, or use shardopt.checkpoint"
            )
    return unit.state_in(state) if quantized else unit.present_in(state)


def _other_elements(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> ValueError | None:
    """An error if the state dict names other ranges of flat shards than this rank's; else None."""
    for number, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
        held = held_elements(group["params"])
        if held is not None and saved_group.get(HELD) not in (None, held):
            return ValueError(
                f"param group {number}: got the state of other elements than this rank's, expected what it itself "
                "saved, on as many ranks; save on each rank, or use shardopt.checkpoint, which loads on any"
            )
    return None


def _boxed(unit: TransferUnit, state: Mapping[str, Any]) -> State:
    """The state with a :class:`Whole` around codes, scales, and floats of another dtype than the parameter's."""
    coding = coding_keys(state)
    boxed: State = {key: Whole(value) if key in coding else value for key, value in state.items()}
    for key, value in state.items():
        if key not in coding and isinstance(value, Tensor) and value.dim() and value.dtype != unit.param.dtype:
            boxed[key] = Whole(value.to(unit.param.device))
    return boxed


def _has_format(group: Mapping[str, Any], entries: Entries) -> bool:
    """Whether a param group of a state dict is of quantized state.

    Raises:
        ValueError: the state is quantized in another way than this optimizer's.
    """
    if is_own(group):
        raise ValueError(
            "got the state of one of shardopt's optimizers, expected state of the bare optimizer or of quantize_state; "
            "save it with state_dict(dequantize=True)"
        )
    if "codec" not in group:
        return False
    signs = group.get(UNSIGNED)
    if not isinstance(signs, list | tuple) or not all(isinstance(name, str) for name in signs):
        raise ValueError(
            f"got state saved with unsigned={signs!r}, expected names of entries; load what state_dict() gives"
        )
    for option, value in format_of(entries).items():
        if option != UNSIGNED and group.get(option) != value:  # signs are checked per entry
            raise ValueError(
                f"got state saved with {option}={group.get(option)!r}, expected {value!r}; pass quantize_state the "
                "options of the run that saved it, or save with state_dict(dequantize=True)"
            )
    return True


def _checked(
    entries: Entries, unit: TransferUnit, state: Mapping[str, Any], name: str, unsigned: Collection[str] | None
) -> tuple[State, State]:
    """Copies of a state's codes, scales and their dtypes; and the other entries, whose floats are still to be encoded.

    Args:
        entries: decides which entries are quantized.
        unit: the tensor.
        state: its state in the state dict.
        name: how errors name the parameter.
        unsigned: entries that were never below zero in the run that saved the state; None for the bare optimizer's.

    Raises:
        ValueError: an entry is of another sign, shape, sharding or dtype, or its values are damaged.
    """
    coding = coding_keys(state)
    lone = [key for key in state if key.endswith(CODING_ENDS) and key not in coding]
    if unsigned is not None and lone:
        raise ValueError(
            f"{name}: got {lone[0]} alone, expected codes and scales together; load what state_dict() gives, and "
            "rename an entry of the optimizer's own"
        )
    coded: State = {}
    for entry in coded_names(state):
        _check_sign(entries, entry, name, unsigned or ())
        if entry + DTYPE in state:
            coded[entry + DTYPE] = checked_dtype(state[entry + DTYPE], entry + DTYPE, name)
        spec = entries.spec(unit, entry)
        local = {}
        for key, form in spec.entries.items():
            if key == "step":
                continue
            if key not in state:
                raise ValueError(
                    f"{name}: got {entry} in codes, expected floats; was it saved with another min_quantized_numel?"
                )
            like = form.new(torch.device("meta"))
            grid = spec.grid_of(key)
            whole = unit.shard.like_parameter(like) if grid is None else unit.shard.like_scales(like, grid)
            check_entry(state[key], whole, key, name)
            if state[key].dtype != form.dtype:
                raise ValueError(f"{name}: got {key} of {state[key].dtype}, expected {form.dtype}")
            local[key] = copy_to(unit.shard.local(state[key]), unit.param.device)
        spec.check_local(local, name)
        coded.update(placed(entries, unit, spec, local))
    rest = {key: value for key, value in state.items() if key not in coding}
    floats = entries.names(unit, rest)
    if unsigned is not None:
        entries.kept.update(floats)  # the run that saved them had detected copies of weights
    else:
        for key in floats:
            check_dense(rest[key], key, name)
            check_moment(unit.shard.local(rest[key]), key, name, signed=entries.moment(key).signed)
    return coded, {key: value if key in floats else _copied(value) for key, value in rest.items()}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def checked_dtype(dtype: object, key: str, name: str) -> object:
    if not any(dtype is coded for coded in CODED_DTYPES):
        raise ValueError(
            f"{name}: got {key} as {dtype}, expected torch.float32 or one of 16 bits; load an undamaged state"
        )
    return dtype


def _check_sign(entries: Entries, entry: str, name: str, unsigned: Collection[str]) -> None:
    saved, expected = (("unsigned" if x else "signed") for x in (entry in unsigned, not entries.moment(entry).signed))
    if saved != expected:
        raise ValueError(
            f"{name}: got {entry} saved as {saved}, expected {expected}; pass quantize_state the unsigned= of the run "
            "that saved it, or save with state_dict(dequantize=True)"
        )


def on_device(unit: TransferUnit, options: Mapping[str, Any], key: str, value: Any) -> Any:
    """An entry that is not quantized, on the device and in the memory order of ``Optimizer.load_state_dict``."""
    if isinstance(value, list | tuple):
        return type(value)(on_device(unit, options, "", item) for item in value)
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        is_moved = options.get("fused") or options.get("capturable")
        return value.to(dtype=torch.float32, device=unit.param.device) if is_moved else value
    local = unit.local
    value = value.to(unit.param.device)
    if value.dim() == 0 or tuple(value.shape) != unit.shard.local_shape:
        return value
    if not local.is_contiguous():  # fused kernels take elements in the order of memory
        value = torch.empty_like(local, dtype=value.dtype).copy_(value)
    return unit.shard.like_parameter(value)
