"""Quantization of float moments: ranks that share a block first all-reduce its extremes, so that scales agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.layout import BlockGrid, FlatShard, RankGroup, Shard, all_or_none, all_reduce_any, reduce_together
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.state.tensor_spec import LoadedEntries, TensorSpec


def cut_quantized_blocks(spec: SliceSpec) -> list[int]:
    """Indices, in the parameter's block grid, of quantized blocks that flat shards cut; the same list on all ranks."""
    return _cut_blocks(spec.shard, spec.grid) if spec.codec.blockwise else []


def _cut_blocks(shard: Shard, grid: BlockGrid) -> list[int]:
    """Indices of the blocks of ``grid`` that are split between ranks with flat shards; the same list on all ranks."""
    return shard.cut_blocks(grid) if isinstance(shard, FlatShard) and shard.ranks is not None else []


class SharedBlocks(NamedTuple):
    """The blocks of one slice that ranks share and therefore all-reduce data of, in the order of the message.

    The message has ``block_count`` blocks on all ranks. This rank has elements of those at ``in_message``, and their
    scales at ``in_scales`` of its own.
    """

    block_count: int
    in_message: list[int] | slice
    in_scales: list[int] | slice


def shared_blocks(shard: Shard, grid: BlockGrid) -> SharedBlocks:
    """The blocks that flat shards cut; for column shards that cut blocks, all blocks of this rank's rows."""
    if shard.block_owners(grid) is not None:
        return SharedBlocks(math.prod(shard.scales(grid).local_shape), slice(None), slice(None))
    numbers = _cut_blocks(shard, grid)
    first, end = shard.block_range(grid) if isinstance(shard, FlatShard) else (0, 0)
    in_message = [index for index, number in enumerate(numbers) if first <= number < end]
    return SharedBlocks(len(numbers), in_message, [numbers[index] - first for index in in_message])


def sharing_ranks(spec: SliceSpec) -> RankGroup | None:
    """The ranks that must agree on scales, as they have parts of the same blocks; None if no quantized block is cut."""
    if cut_quantized_blocks(spec):
        return spec.shard.holders
    return spec.shard.block_owners(spec.grid) if spec.has_column_cut_blocks else None


class FloatMoments(NamedTuple):
    """The float moments of one slice: this rank's part of each, or None if it has no moments to encode."""

    spec: SliceSpec
    values: Sequence[Tensor] | None
    name: str


def encode_slices(slices: Sequence[FloatMoments], rank_groups: Sequence[RankGroup] = ()) -> list[StateDict | None]:
    """Quantizes float moments to state entries. Collective: ranks that share blocks all-reduce the blocks' extremes.

    All ranks that share blocks must call this with the same slices in the same order. If one rank of a group fails,
    for example for lack of memory, or because only some ranks with column shards of a parameter have moments of it, all
    ranks of the group raise.
    """
    agreed: list[dict[str, Tensor]] = [{} for _ in slices]
    # Relative moments come second: they are coded in units of a root, which the first pass's agreed extremes determine.
    for relative in (False, True):
        messages = all_or_none(rank_groups, partial(_local_extremes, slices, agreed, relative=relative))
        for ranks, message in messages.items():
            reduce_together(ranks.all_reduce_max, list(message.values()))
        agreed = all_or_none(rank_groups, partial(_with_reduced, agreed, messages, slices))
    encoded = zip(slices, agreed, strict=True)
    return all_or_none(
        rank_groups, lambda: [None if x.values is None else x.spec.encode(x.values, known) for x, known in encoded]
    )


def encode_loaded(
    specs: Sequence[TensorSpec], loaded: Sequence[LoadedEntries], names: Sequence[str], groups: Sequence[RankGroup]
) -> list[LoadedEntries]:
    """Quantizes the float moments in loaded state (as torch.optim saves it); leaves other entries unchanged.

    Collective: all ranks that share parameters must call this with the same tensors, in the same order. Entries have
    passed :meth:`TensorSpec.check_loaded`. Raises what :func:`encode_slices` does.
    """
    slices: list[FloatMoments] = []
    for spec, entries, name in zip(specs, loaded, names, strict=True):
        values: Sequence[Sequence[Tensor] | None] = [None] * len(spec.slices)
        if entries and spec.has_float_moments(entries):
            values = spec.split_moments(entries)
        slices += [FloatMoments(slice_, x, name) for slice_, x in zip(spec.slices, values, strict=True)]
    if not all_reduce_any(groups, any(x.values is not None for x in slices)):
        return list(loaded)
    encoded = iter(encode_slices(slices, groups))
    results: list[LoadedEntries] = []
    for spec, entries in zip(specs, loaded, strict=True):
        # Of a tensor's slices, all or none had float moments.
        states = [state for state in islice(encoded, len(spec.slices)) if state is not None]
        if entries is not None and states:
            floats = {moment.name for moment in spec.moments}
            others = {key: value for key, value in entries.items() if key not in floats}
            entries = {**others, **spec.join(states)}
        results.append(entries)
    return results


#: A message to all-reduce: by slice index and moment name, extremes of shared blocks, int32 ``(blocks, 2)`` on the CPU.
_Message = dict[tuple[int, str], Tensor]

#: In place of a moment's name: two flags, whether a rank has moments to encode and whether one has none. Both are set
#: after the all-reduce if the ranks with column shards of a parameter disagree.
_FLAGS = ""


def _local_extremes(
    slices: Sequence[FloatMoments], agreed: Sequence[Mapping[str, Tensor]], *, relative: bool
) -> dict[RankGroup, _Message]:
    """Computes the extremes that this rank contributes, by the rank group that will all-reduce them.

    With ``relative``, only of moments that are coded in units of another moment's root, else only of the other moments.
    """
    messages: dict[RankGroup, _Message] = {}
    for index, ((spec, values, _), known) in enumerate(zip(slices, agreed, strict=True)):
        ranks, moments = sharing_ranks(spec), [m for m in spec.moments if spec.has_scales(m)]
        are_relative = {m.name for m in moments if spec.has_relative_moments and m.is_relative(spec.codec)}
        names = [m.name for m in moments if (m.name in are_relative) == relative]
        if ranks is None or not names:
            continue
        message, blocks = messages.setdefault(ranks, {}), shared_blocks(spec.shard, spec.grid)
        may_lack_moments = isinstance(spec.shard, FlatShard)  # ranks without elements of the parameter
        if not relative and not may_lack_moments:
            flags = [[values is not None, values is None]]
            message[index, _FLAGS] = torch.tensor(flags, dtype=torch.int32, device="cpu")
        extremes = {} if values is None else spec.extremes(values, known)
        for name in names:
            message[index, name] = torch.zeros((blocks.block_count, 2), dtype=torch.int32, device="cpu")
            if values is not None:
                message[index, name][blocks.in_message] = extremes[name][blocks.in_scales].cpu()
    return messages


def _with_reduced(
    agreed: Sequence[Mapping[str, Tensor]], messages: Mapping[RankGroup, _Message], slices: Sequence[FloatMoments]
) -> list[dict[str, Tensor]]:
    """Returns each slice's ``agreed`` extremes, by moment, with the all-reduced ones of this rank's blocks added.

    Raises ValueError if only some of the ranks with column shards of a parameter have moments of it.
    """
    results = [dict(known) for known in agreed]
    for (index, moment), reduced in (item for message in messages.values() for item in message.items()):
        spec, values, name = slices[index]
        if moment == _FLAGS:
            if reduced.all():
                raise ValueError(
                    f"{name}: got float moments on some ranks only, expected them on all or on none; load what all "
                    "ranks saved together"
                )
        elif values is not None:
            blocks = shared_blocks(spec.shard, spec.grid)
            extremes = results[index][moment] = spec.zero_extremes(values[0].device)
            extremes[blocks.in_scales] = reduced[blocks.in_message].to(extremes.device)
    return results
