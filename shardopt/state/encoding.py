"""Quantization of float moments: ranks that share a block first all-reduce its extremes, so that scales agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.layout import BlockGrid, FlatShard, RankGroup, Shard, all_or_none, all_reduce_any, reduce_together
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.state.tensor_spec import TensorSpec


def shared_blocks(spec: SliceSpec) -> list[int]:
    """Indices, in the parameter's block grid, of quantized blocks that flat shards cut; the same list on all ranks."""
    return cut_blocks(spec.shard, spec.grid) if spec.codec.blockwise else []


def cut_blocks(shard: Shard, grid: BlockGrid) -> list[int]:
    """Indices of the blocks of ``grid`` that are split between ranks with flat shards; the same list on all ranks."""
    return shard.cut_blocks(grid) if isinstance(shard, FlatShard) and shard.ranks is not None else []


def held_of(numbers: Sequence[int], shard: Shard, grid: BlockGrid) -> tuple[list[int], list[int]]:
    """Positions in ``numbers`` (indices of cut blocks) that this rank holds, and those blocks' rows in its scales."""
    first, end = shard.block_range(grid) if isinstance(shard, FlatShard) else (0, 0)
    held = [place for place, number in enumerate(numbers) if first <= number < end]
    return held, [numbers[place] - first for place in held]


def sharing_ranks(spec: SliceSpec) -> RankGroup | None:
    """The ranks that must agree on scales, as blocks of the parameter are split between them; None if none is."""
    if shared_blocks(spec):
        return spec.shard.holders
    return spec.shard.block_owners(spec.grid) if spec.exchanges_columns else None


class Floats(NamedTuple):
    """The float moments of one slice, as input of :func:`encode_slices`.

    Attributes:
        spec: describes the slice's state.
        values: this rank's part of each moment; None if this rank has no moments to encode.
        name: the parameter's name in errors.
    """

    spec: SliceSpec
    values: Sequence[Tensor] | None
    name: str


def encode_slices(slices: Sequence[Floats], rank_groups: Sequence[RankGroup] = ()) -> list[StateDict | None]:
    """Quantizes float moments to state entries; ranks that share a block all-reduce its extremes to get equal scales.

    All ranks that share blocks must call this with the same slices in the same order. If one rank of a group fails,
    for example for lack of memory, all ranks of the group raise.

    Raises:
        ValueError: only some of the ranks with column shards of a parameter have moments of it.
    """
    agreed: list[dict[str, Tensor]] = [{} for _ in slices]
    for relative in (False, True):  # True: moments coded in units of another's root
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
    """Quantizes the float moments in loaded state (as torch.optim saves it); leaves other entries unchanged.

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
    if not all_reduce_any(rank_groups, any(x.values is not None for x in slices)):
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


#: Extremes of shared blocks that are all-reduced: int32 ``(blocks, 2)`` on the CPU, by slice index and moment name. For
#: column shards, the name "" has the flags (has moments to encode, has none), which find ranks that disagree.
_Parts = dict[tuple[int, str], Tensor]


def _messages(
    slices: Sequence[Floats], agreed: Sequence[Mapping[str, Tensor]], *, relative: bool
) -> dict[RankGroup, _Parts]:
    """Computes this rank's extremes of shared blocks, by the rank group that will all-reduce them.

    ``relative`` selects moments that are coded in units of another moment's root; otherwise all others are taken.
    """
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
    """Copies all-reduced extremes of this rank's blocks to ``agreed``; raises if only some ranks have moments."""
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
    """Zeros for two extremes per block of this rank: 0 is neutral in the maximum that is taken later."""
    return torch.zeros((math.prod(spec.shard.scales(spec.grid).local_shape), 2), dtype=torch.int32, device=device)


def _places(spec: SliceSpec) -> tuple[int, list[int] | slice, list[int] | slice]:
    """Block count of a slice's all-reduce, the indices in it of this rank's blocks, and their indices in its scales.

    Column shards all-reduce the extremes of all blocks of their rows.
    """
    if not isinstance(spec.shard, FlatShard):
        return math.prod(spec.shard.scales(spec.grid).local_shape), slice(None), slice(None)
    numbers = shared_blocks(spec)
    return len(numbers), *held_of(numbers, spec.shard, spec.grid)
