"""Encoding of float moments under flat shards: ranks put together the blocks that their ranges cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.layout import Exchange, FlatShard
from shardopt.state.agreement import all_or_none, on_any_rank
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.state.tensor_state import TensorState, flat_slices


def shared_blocks(spec: SliceSpec) -> list[int]:
    """The blocks on whose scales several ranks have to agree: numbers in the grid, equal on all ranks."""
    shard = spec.shard
    if not isinstance(shard, FlatShard) or shard.exchange is None:
        return []
    return shard.cut_blocks(spec.grid) if spec.codec.blockwise else []


def encode_flat(
    specs: Sequence[SliceSpec], values: Sequence[Sequence[Tensor] | None], exchanges: Sequence[Exchange] = ()
) -> list[StateDict | None]:
    """The state entries for float moments under flat shards; cut blocks are put together from their owners' parts.

    All ranks must call this with the same slices in the same order.

    Args:
        specs: describe the slices' states.
        values: per slice, this rank's part of each moment; None for a slice without moments to encode.
        exchanges: the ranks that raise together if one of them cannot encode its part, as for lack of memory.
    """
    shared = all_or_none(exchanges, lambda: _fragments(specs, values))
    for exchange, (_, flat) in shared.items():
        exchange.all_reduce_sum(flat)
    return all_or_none(exchanges, lambda: _encode_completed(specs, values, shared))


def encode_flat_moments(
    specs: Sequence[TensorState], loaded: Sequence[Mapping[str, Any] | None], exchanges: Sequence[Exchange]
) -> list[Mapping[str, Any] | None]:
    """Replaces float moments (torch.optim's state) under flat shards by codes and scales; leaves other entries alone.

    All ranks must call this with the same tensors, in the same order, if any of them has flat shards.

    Args:
        specs: describe the state of each tensor.
        loaded: the tensors' entries, which passed :meth:`TensorState.check_loaded`; None for a tensor without state.
        exchanges: the ranks that raise together if one of them cannot encode its part; see :func:`agreeing`.
    """
    slices: list[SliceSpec] = []
    values: list[Sequence[Tensor] | None] = []
    for spec, entries in zip(specs, loaded, strict=True):
        flat = flat_slices(spec)
        slices += flat
        if flat and entries and spec.has_floats(entries):
            values += spec.split_moments(entries)
        else:
            values += [None] * len(flat)
    if not slices or not on_any_rank(exchanges, any(moments is not None for moments in values)):
        return list(loaded)
    encoded = iter(encode_flat(slices, values, exchanges))
    results: list[Mapping[str, Any] | None] = []
    for spec, entries in zip(specs, loaded, strict=True):
        states = [state for _ in flat_slices(spec) if (state := next(encoded)) is not None]
        if entries is not None and states:
            floats = {moment.name for moment in spec.moments}
            entries = {**{k: v for k, v in entries.items() if k not in floats}, **spec.join(states)}
        results.append(entries)
    return results


def _fragments(
    specs: Sequence[SliceSpec], values: Sequence[Sequence[Tensor] | None]
) -> dict[Exchange, tuple[list[tuple[int, Tensor]], Tensor]]:
    """This rank's parts of cut blocks: slices' indices and tensors to be filled, and all parts in one CPU tensor."""
    shared: dict[Exchange, list[tuple[int, Tensor]]] = {}
    for index, (spec, moments) in enumerate(zip(specs, values, strict=True)):
        numbers = shared_blocks(spec)
        if numbers:
            assert isinstance(spec.shard, FlatShard)
            assert spec.shard.exchange is not None
            device = moments[0].device if moments else torch.device("cpu")
            blocks = torch.zeros((len(numbers), len(spec.moments), spec.grid.block_size), device=device)
            for k, x in enumerate(moments or ()):
                _copy_fragments(spec, x, numbers, blocks[:, k])
            shared.setdefault(spec.shard.exchange, []).append((index, blocks))
    return {
        exchange: (slices, torch.cat([blocks.reshape(-1).cpu() for _, blocks in slices]))
        for exchange, slices in shared.items()
    }


def _encode_completed(
    specs: Sequence[SliceSpec],
    values: Sequence[Sequence[Tensor] | None],
    shared: Mapping[Exchange, tuple[list[tuple[int, Tensor]], Tensor]],
) -> list[StateDict | None]:
    complete: dict[int, dict[int, Tensor]] = {}
    for slices, flat in shared.values():
        for (index, blocks), summed in zip(slices, torch.split(flat, [b.numel() for _, b in slices]), strict=True):
            numbers = shared_blocks(specs[index])
            complete[index] = dict(zip(numbers, summed.view_as(blocks).to(blocks.device), strict=True))
    return [
        None if moments is None else spec.encode_local(moments, complete.get(index))  # type: ignore[arg-type]
        for index, (spec, moments) in enumerate(zip(specs, values, strict=True))
    ]


def _copy_fragments(spec: SliceSpec, x: Tensor, numbers: Sequence[int], blocks: Tensor) -> None:
    """Copies this rank's elements of the blocks ``numbers`` into ``blocks``, shape ``(len(numbers), block_size)``."""
    shard, grid = spec.shard, spec.grid
    assert isinstance(shard, FlatShard)
    for row, number in zip(blocks, numbers, strict=True):
        first = grid.first_element(number)
        end = min(first + grid.block_size, (first // grid.row_numel + 1) * grid.row_numel)
        begin, stop = max(first, shard.start), min(end, shard.end)
        if begin < stop:
            row[begin - first : stop - first] = x[begin - shard.start : stop - shard.start]
