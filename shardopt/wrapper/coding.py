"""A chunk's state in codes and in floats. Ranks exchange the extremes of the blocks that their shards cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from shardopt.layout import Exchange, FlatShard
from shardopt.state.flat_encoding import encode_flat, shared_blocks
from shardopt.state.slice_spec import SliceSpec
from shardopt.wrapper.chunks import TransferUnit
from shardopt.wrapper.entries import Entries

_CODES, _SCALES, DTYPE = "_codes", "_scales", "_dtype"

#: Sentinel for no number in a maximum of int32.
_NONE = -(2**31)

State = dict[str, Any]

#: Suffixes of the names of codes and scales.
CODING_ENDS = (_CODES, _SCALES)


def coded_names(state: Mapping[str, Any]) -> list[str]:
    """The names of the entries that are stored as codes and scales."""
    ends = (key.removesuffix(_CODES) for key in state if key.endswith(_CODES))
    return [name for name in ends if name + _SCALES in state]


def coding_keys(state: Mapping[str, Any]) -> set[str]:
    """The keys of codes, scales, and dtypes other than the parameter's, which together encode entries in floats."""
    return {name + end for name in coded_names(state) for end in (_CODES, _SCALES, DTYPE)} & state.keys()


def decoded(entries: Entries, unit: TransferUnit, state: Mapping[str, Any]) -> State:
    """The state of a tensor in floats: as the optimizer left it, up to rounding errors of the codec."""
    coding = coding_keys(state)
    floats: State = {}
    for key, value in state.items():
        name = key.removesuffix(_CODES)
        if key not in coding:
            floats[key] = value
        elif key != name:
            floats[name] = _decoded_entry(entries, unit, state, name)
    return floats


def _decoded_entry(entries: Entries, unit: TransferUnit, state: Mapping[str, Any], name: str) -> Tensor:
    param = unit.local
    coded = {key: unit.shard.local(state[key]).to(param.device) for key in (name + _CODES, name + _SCALES)}
    (x,) = entries.spec(unit, name).decode(coded)
    x = x.to(state.get(name + DTYPE, param.dtype))
    if not param.is_contiguous():  # fused kernels take elements in the order of memory
        x = torch.empty_like(param, dtype=x.dtype).copy_(x)
    return unit.shard.like_parameter(x)


def encoded(
    entries: Entries,
    units: Sequence[TransferUnit],
    states: Sequence[State | None],
    stored: Sequence[Mapping[str, Any]],
    failure: Exception | None = None,
) -> list[State | None]:
    """The states of tensors with codes instead of floats. Takes the floats out of ``states`` one after another.

    Ranks that hold parts of the same cut blocks must all call this, with the same tensors.

    Args:
        entries: decides which entries are quantized.
        units: the tensors.
        states: the tensors' states in floats; None for no state.
        stored: the tensors' former states, whose memory is used again.
        failure: an error to raise here; ranks that would wait for this one raise, too.

    Raises:
        ValueError: an unsigned entry has a value below zero; or ranks have different entries.
        RuntimeError: another rank failed.
    """
    names = [[] if state is None else entries.names(unit, state) for unit, state in zip(units, states, strict=True)]
    try:
        if failure is None:
            _check_signs(entries, states, names)
    except ValueError as error:
        failure = error
    counts = _agreed_counts(entries, units, names, failure)
    flat = _encoded_cut_blocks(entries, units, states, names, counts)
    results: list[State | None] = []
    for index, (unit, state, old) in enumerate(zip(units, states, stored, strict=True)):
        if state is None:
            results.append(None)
            continue
        new: State = {}
        for key in list(state):
            value = state.pop(key)
            if key not in names[index]:
                new[key] = value
                continue
            spec = entries.spec(unit, key)
            coded = flat.get((index, key)) or spec.encode([unit.shard.local(value)])
            new.update(_stored(entries, unit, spec, coded, old))
            if value.dtype != unit.param.dtype:
                new[key + DTYPE] = value.dtype
        results.append(new)
    return results


def placed(entries: Entries, unit: TransferUnit, spec: SliceSpec, coded: Mapping[str, Tensor]) -> State:
    """Local codes and scales in the form of the state: sharded like the parameter, on the state's device."""
    result = {}
    for key, local in coded.items():
        if entries.options["offload"] == "state" and unit.param.device.type != "cpu":
            local = torch.empty_like(local, device="cpu", pin_memory=True).copy_(local)
        local = local if entries.options["offload"] else local.to(unit.param.device)
        grid = spec.grid_of(key)
        result[key] = unit.shard.like_parameter(local) if grid is None else unit.shard.like_scales(local, grid)
    return result


def _stored(
    entries: Entries, unit: TransferUnit, spec: SliceSpec, coded: Mapping[str, Tensor], old: Mapping[str, Any]
) -> State:
    """Local codes and scales in the form of the state, in the memory of the former ones."""
    if not coded.keys() <= old.keys():
        return placed(entries, unit, spec, coded)
    for key, local in coded.items():
        unit.shard.local(old[key]).copy_(local)
    return {key: old[key] for key in coded}


def _check_signs(entries: Entries, states: Sequence[State | None], names: Sequence[Sequence[str]]) -> None:
    """Reads one number per chunk and device unless something is wrong."""
    minima: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for state, quantized in zip(states, names, strict=True):
        for name in quantized:
            assert state is not None
            local = state[name].to_local() if hasattr(state[name], "to_local") else state[name]
            if not entries.moment(name).signed and local.numel():
                minima.setdefault(local.device, []).append((name, local.amin().float()))
    for least in minima.values():
        lowest = torch.stack([x for _, x in least])
        if (lowest < 0).any():
            name, value = next((name, float(x)) for name, x in least if x < 0)
            raise ValueError(
                f"{name}: got {value:g} in a state entry that is unsigned, expected numbers >= 0; leave {name} out of "
                f"unsigned=, or pass keep=({name!r},) if it is in shardopt's table"
            )


class _Cut(NamedTuple):
    """A tensor with cut blocks: its index, and whether column shards cut them, so that ranks exchange columns."""

    number: int
    gathers: bool


def _cuts(entries: Entries, units: Sequence[TransferUnit]) -> dict[Exchange, list[_Cut]]:
    """The tensors with cut blocks by the exchange of the ranks that hold them; alike on all of these ranks."""
    cuts: dict[Exchange, list[_Cut]] = {}
    for index, unit in enumerate(units):
        if not unit.shard.cuts_rows or unit.shard.holders is None or not entries.is_quantized(unit.shard):
            continue
        spec = entries.spec(unit, "")
        if spec.exchanges_columns or shared_blocks(spec):
            cuts.setdefault(unit.shard.holders, []).append(_Cut(index, spec.exchanges_columns))
    return cuts


def _agreed_counts(
    entries: Entries, units: Sequence[TransferUnit], names: Sequence[Sequence[str]], failure: Exception | None
) -> dict[int, int]:
    """The number of entries to exchange per tensor with cut blocks: a rank without elements may have no state.

    Raises:
        ValueError: ranks have different entries.
        RuntimeError: another rank failed. If this one failed, it raises ``failure`` instead.
    """
    counts: dict[int, int] = {}
    error: Exception | None = None  # raised at the end: the ranks of the next exchange wait for this one
    for exchange, cut in _cuts(entries, units).items():
        rows = [[0, int(failure is not None), 0, 0]]
        for index, gathers in cut:
            quantized = names[index]
            key = crc32(",".join(sorted(quantized)).encode()) >> 1
            count = len(quantized)
            rows.append([count, -count, key, -key] if quantized or gathers else [0, _NONE, 0, _NONE])
        agreed = torch.tensor(rows, dtype=torch.int32, device="cpu")
        exchange.all_reduce_max(agreed)
        if agreed[0, 1]:
            error = error or RuntimeError(
                "got a step that failed on another rank, expected success on all ranks; that rank's error says why"
            )
        for (index, _), (most, least, high, low) in zip(cut, agreed[1:].tolist(), strict=True):
            counts[index] = most
            if (most, high) != (-least, -low) and least != _NONE:
                unit = units[index]
                error = error or ValueError(
                    f"parameter {unit.position} of param group {unit.group}: got {names[index] or 'no entries'} on one "
                    "rank, expected the same state entries on all ranks that hold parts of the parameter; give it a "
                    "gradient on all of them or on none"
                )
    if failure is not None or error is not None:
        raise failure or error  # type: ignore[misc]
    return counts


def _encoded_cut_blocks(
    entries: Entries,
    units: Sequence[TransferUnit],
    states: Sequence[State | None],
    names: Sequence[Sequence[str]],
    counts: Mapping[int, int],
) -> dict[tuple[int, str], State]:
    """Codes and scales of entries of flat shards with cut blocks, after one exchange for the whole chunk."""
    keys: list[tuple[int, str]] = []
    specs: list[SliceSpec] = []
    values: list[Sequence[Tensor] | None] = []
    for index, count in counts.items():
        unit, state = units[index], states[index]
        if not isinstance(unit.shard, FlatShard):
            continue
        for name in sorted(names[index]) or [""] * count:  # without state: zeros for the other ranks
            keys.append((index, name))
            specs.append(entries.spec(unit, name))
            values.append([state[name]] if state and name else None)
    coded = zip(keys, encode_flat(specs, values), strict=True) if specs else ()
    return {key: state for key, state in coded if state is not None}
