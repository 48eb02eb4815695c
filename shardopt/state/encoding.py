"""Encoding of float moments: ranks that hold parts of a block first agree on its extremes, as they do in a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.layout import BlockGrid, FlatShard, RankGroup, Shard, all_or_none, on_any_rank, reduce_together
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.state.tensor_spec import TensorSpec


def shared_blocks(spec: SliceSpec) -> list[int]:
    """The blocks on whose scales several ranks have to agree: numbers in the grid, equal on all ranks."""
    return cut_blocks(spec.shard, spec.grid) if spec.codec.blockwise else []


def cut_blocks(shard: Shard, grid: BlockGrid) -> list[int]:
    """The blocks of a grid that flat shards cut, on this rank or not: numbers in the grid, equal on all ranks."""
    return shard.cut_blocks(grid) if isinstance(shard, FlatShard) and shard.ranks is not None else []


def held_of(numbers: Sequence[int], shard: Shard, grid: BlockGrid) -> tuple[list[int], list[int]]:
    """Which of some cut blocks this rank holds parts of, and their places in this rank's scales."""
    first, end = shard.blocks(grid) if isinstance(shard, FlatShard) else (0, 0)
    held = [place for place, number in enumerate(numbers) if first <= number < end]
    return held, [numbers[place] - first for place in held]


def sharing_ranks(spec: SliceSpec) -> RankGroup | None:
    """The ranks that hold parts of the same blocks of a parameter; None if no block is cut."""
    if shared_blocks(spec):
        return spec.shard.holders
    return spec.shard.block_owners(spec.grid) if spec.exchanges_columns else None


class Floats(NamedTuple):
    """Float moments of a slice, to be encoded.

    Attributes:
        spec: describes the slice's state.
        values: this rank's part of each moment; None if this rank has none to encode.
        name: the parameter's name in errors.
    """

    spec: SliceSpec
    values: Sequence[Tensor] | None
    name: str


def encode_slices(slices: Sequence[Floats], rank_groups: Sequence[RankGroup] = ()) -> list[StateDict | None]:
    """The state entries for float moments, in scales that all holders of a block agree on.

    All ranks that share blocks must call this with the same slices in the same order. The ranks of a group raise
    together if one of them cannot encode its part, as for lack of memory.

    Raises:
        ValueError: only some of the ranks with column shards of a parameter have moments of it.
    """
    agreed: list[dict[str, Tensor]] = [{} for _ in slices]
    for relative in (False, True):  # moments in units of another's root follow the root
        messages = all_or_none(rank_groups, partial(_messages, slices, agreed, relative=relative))
        for ranks, parts in messages.items():
            reduce_together(ranks.all_reduce_max, list(parts.values()))
        all_or_none(rank_groups, partial(_take, messages, slices, agreed))
    encoded = zip(slices, agreed, strict=True)
    return all_or_none(
        rank_groups, lambda: [None if x.values is None else x.spec.encode(x.values, known) for x, known in encoded]
    )


def encode_loaded(
    specs: Sequence[TensorSpec],
    loaded: Sequence[Mapping[str, Any] | None],
    names: Sequence[str],
    rank_groups: Sequence[RankGroup],
) -> list[Mapping[str, Any] | None]:
    """Replaces float moments (torch.optim's state) by the state's own entries; leaves other entries alone.

    All ranks that share parameters must call this with the same tensors, in the same order. Entries have passed
    :meth:`TensorSpec.check_loaded`; they are None for a tensor without state.

    Raises:
        ValueError: see :func:`encode_slices`.
    """
    slices: list[Floats] = []
    for spec, entries, name in zip(specs, loaded, names, strict=True):
        values: Sequence[Sequence[Tensor] | None] = [None] * len(spec.slices)
        if entries and spec.has_floats(entries):
            values = spec.split_moments(entries)
        slices += [Floats(slice_, x, name) for slice_, x in zip(spec.slices, values, strict=True)]
    if not on_any_rank(rank_groups, any(x.values is not None for x in slices)):
        return list(loaded)
    encoded = iter(encode_slices(slices, rank_groups))
    results: list[Mapping[str, Any] | None] = []
    for spec, entries in zip(specs, loaded, strict=True):
        states = [state for _ in spec.slices if (state := next(encoded)) is not None]
        if entries is not None and states:
            floats = {moment.name for moment in spec.moments}
            entries = {**{k: v for k, v in entries.items() if k not in floats}, **spec.join(states)}
        results.append(entries)
    return results


#: The parts of a message, int32 ``(n, 2)`` on the CPU, by slice and moment: extremes of shared blocks. For column
#: shards the part of no moment says whether a rank has moments to encode, and whether a rank has none.
_Parts = dict[tuple[int, str], Tensor]


def _messages(
    slices: Sequence[Floats], agreed: Sequence[Mapping[str, Tensor]], *, relative: bool
) -> dict[RankGroup, _Parts]:
    """This rank's extremes of shared blocks, of the moments in units of another's root or of all other moments."""
    messages: dict[RankGroup, _Parts] = {}
    for index, ((spec, values, _), known) in enumerate(zip(slices, agreed, strict=True)):
        ranks = sharing_ranks(spec)
        moments = [m for m in spec.moments if spec.has_scales(m)]
        names = [m.name for m in moments if (spec.relative and m.is_relative(spec.codec)) == relative]
        if ranks is None or not names:
            continue
        parts, (count, sent, local) = messages.setdefault(ranks, {}), _places(spec)
        if not relative and not isinstance(spec.shard, FlatShard):
            parts[index, ""] = torch.tensor([[values is not None, values is None]], dtype=torch.int32, device="cpu")
        found = {} if values is None else {name: _new_extremes(spec, values[0].device) for name in names}
        if values is not None:
            spec.encode(values, known, found)
        for name in names:
            part = parts[index, name] = torch.zeros((count, 2), dtype=torch.int32, device="cpu")
            if found:
                part[sent] = found[name][local].cpu()
    return messages


def _take(messages: Mapping[RankGroup, _Parts], slices: Sequence[Floats], agreed: Sequence[dict[str, Tensor]]) -> None:
    """Reads the answers: the extremes over all ranks."""
    for (index, moment), part in (item for parts in messages.values() for item in parts.items()):
        spec, values, name = slices[index]
        if not moment:
            if part.all():
                raise ValueError(
                    f"{name}: got float moments on some ranks only, expected them on all or on none; load what all "
                    "ranks saved together"
                )
        elif values is not None:
            _, sent, local = _places(spec)
            extremes = agreed[index][moment] = _new_extremes(spec, values[0].device)
            extremes[local] = part[sent].to(extremes.device)


def _new_extremes(spec: SliceSpec, device: torch.device) -> Tensor:
    """Extremes of this rank's blocks, of which none is known yet: 0 is neutral."""
    return torch.zeros((math.prod(spec.shard.scales(spec.grid).local_shape), 2), dtype=torch.int32, device=device)


def _places(spec: SliceSpec) -> tuple[int, list[int] | slice, list[int] | slice]:
    """How many blocks a message has, which of them this rank holds, and their indices in this rank's scales.

    Column shards send the extremes of all blocks of their rows.
    """
    if not isinstance(spec.shard, FlatShard):
        return math.prod(spec.shard.scales(spec.grid).local_shape), slice(None), slice(None)
    numbers = shared_blocks(spec)
    return len(numbers), *held_of(numbers, spec.shard, spec.grid)
