"""All-reduces during a step for codec blocks that shards cut, so that all ranks with a part agree on the scales."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardopt import _C
from shardopt.layout import RankGroup, Shard, contiguous_ranges, reduce_together
from shardopt.state.encoding import cut_quantized_blocks
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.step.agreement import order_of

#: For each block that flat shards cut, by shard and the block's number: per moment the address of its extremes, padded
#: with zeros to the table's width.
ExtremeAddresses = dict[tuple[Shard, int], list[int]]


class CutColumns(NamedTuple):
    """The buffers of a parameter with column shards that cut blocks, all-reduced by the ranks that share its rows.

    Attributes:
        ranks: the ranks that hold columns of the same rows.
        has_relative: whether a moment is coded in units of the root of another moment.
        scales: float32, ``(rows, blocks[, scales per block])``, one per moment with scales: the state entries.
        extremes: int32, ``(pieces, rows, blocks, 2)``, one per moment, for each piece of a block that this rank holds.
        old_scales: float32, ``(pieces - 1, *scales.shape)``, per moment, or None without scales: the kernels decode
            further pieces of a block with these, as the first piece may have replaced the block's scales by then.
        other_blocks: int64, 1-D: indices of the blocks in a row of which this rank holds no element.
    """

    ranks: RankGroup
    has_relative: bool
    scales: list[Tensor]
    extremes: list[Tensor]
    old_scales: list[Tensor | None]
    other_blocks: Tensor

    @classmethod
    def of(cls, spec: SliceSpec, state: StateDict, device: torch.device) -> CutColumns:
        """Allocates the buffers for a parameter on a device, given its state as plain (local) tensors."""
        ranks = spec.shard.block_owners(spec.grid)
        assert ranks is not None
        size, pieces_of = spec.grid.block_size, np.zeros(spec.grid.blocks_per_row, np.int64)
        for first, end in contiguous_ranges(spec.shard.global_shape[1:], spec.shard.indices[1:]):  # columns
            pieces_of[first // size : -(-end // size)] += 1
        pieces = max(int(pieces_of.max()), 1)
        shape = (pieces, spec.shard.rows, len(pieces_of), 2)
        scales = [spec.codes_and_scales(state, moment).scales for moment in spec.moments]
        return cls(
            ranks,
            spec.has_relative_moments,
            [of_moment for of_moment in scales if of_moment is not None],
            [torch.zeros(shape, dtype=torch.int32, device=device) for _ in spec.moments],
            [None if x is None else x.new_empty((pieces - 1, *x.shape)) for x in scales],
            torch.from_numpy(np.flatnonzero(pieces_of == 0)).to(device),
        )


class CutBlocks:
    """All-reduces the extremes and scales of codec blocks that are cut between ranks, for parameters on a device.

    Every step exchanges all blocks that flat shards cut, even if this rank has no elements or no gradient of a
    parameter, as other ranks cannot know. Of column shards, only parameters with a gradient are exchanged.

    Args:
        specs: the slices, of which only flat shards count, in an order that is equal on all ranks.

    Attributes:
        extreme_addresses: where kernels write, and later read, the extremes of blocks that flat shards cut.
        has_relative: whether a moment is coded in units of the root of another moment, and so in a later phase.
    """

    def __init__(self, specs: Iterable[SliceSpec], device: torch.device) -> None:
        self._has_relative_flat = False
        self._flat_extremes: dict[RankGroup, Tensor] = {}  # int32, (blocks x moments, 2)
        self.extreme_addresses: ExtremeAddresses = {}
        blocks: dict[RankGroup, list[tuple[Shard, int, int]]] = {}  # with the number of moments
        for spec in specs:
            for number in cut_quantized_blocks(spec):
                assert spec.shard.ranks is not None
                blocks.setdefault(spec.shard.ranks, []).append((spec.shard, number, len(spec.moments)))
                self._has_relative_flat |= spec.has_relative_moments
        for ranks, of_ranks in blocks.items():
            rows = sum(moments for _, _, moments in of_ranks)
            extremes = self._flat_extremes[ranks] = torch.zeros((rows, 2), dtype=torch.int32, device=device)
            row = iter(extremes)
            for shard, number, moments in of_ranks:
                addresses = [next(row).data_ptr() for _ in range(moments)]
                self.extreme_addresses[shard, number] = addresses + [0] * (_C.max_moments - moments)
        self.select_columns(())

    def __bool__(self) -> bool:
        """Whether a step of the selected parameters exchanges anything."""
        return bool(self._columns or self._flat_extremes)

    def select_columns(self, columns: Iterable[CutColumns]) -> None:
        """Sets the column shards whose parameters have a gradient, in an order that is equal on all ranks."""
        self._columns = list(columns)
        self.has_relative = self._has_relative_flat or any(column.has_relative for column in self._columns)
        self._columns_of: dict[RankGroup, list[CutColumns]] = {}
        for column in sorted(self._columns, key=lambda column: order_of(column.ranks)):
            self._columns_of.setdefault(column.ranks, []).append(column)

    @property
    def memory(self) -> list[Tensor]:
        """The buffers that kernels and all-reduces use in addition to the state."""
        buffers = (x for column in self._columns for x in (*column.extremes, *column.old_scales, column.other_blocks))
        return [*self._flat_extremes.values(), *(x for x in buffers if x is not None)]

    def copy_scales(self) -> None:
        """Fills ``old_scales`` of column shards that have several pieces of a block, before the kernels read them."""
        for column in self._columns:
            if len(column.extremes[0]) > 1:
                for copies, scales in zip((x for x in column.old_scales if x is not None), column.scales, strict=True):
                    copies.copy_(scales)

    def clear_extremes(self) -> None:
        """Sets extremes to zero before a step: zero is neutral in the all-reduce by maximum."""
        for extremes in (*self._flat_extremes.values(), *(x for column in self._columns for x in column.extremes)):
            extremes.zero_()

    def reduce_extremes(self) -> None:
        """All-reduces extremes by maximum: each rank then has a block's extremes over all ranks with a part of it."""
        for ranks, buffer in self._flat_extremes.items():
            ranks.all_reduce_max(buffer)
        for ranks, columns in self._columns_of.items():
            every = [extremes for column in columns for extremes in column.extremes]
            for extremes in every:
                if len(extremes) > 1:  # combine this rank's pieces of a block
                    extremes[0] = extremes.amax(0)
            reduce_together(ranks.all_reduce_max, [extremes[0] for extremes in every])
            for extremes in every:
                extremes[1:] = extremes[0]

    def share_scales(self) -> None:
        """All-reduces scales, so that each rank with columns of a row has the scales of all blocks of the row."""
        for ranks, columns in self._columns_of.items():
            for column in columns:
                for scales in column.scales:
                    scales.index_fill_(1, column.other_blocks, 0)
            # Scales are not negative: the order of their bits as integers is their order as floats.
            every = [scales.view(torch.int32) for column in columns for scales in column.scales]
            reduce_together(ranks.all_reduce_max, every)
