"""The one new file of a new kind of shard: bands, equal parts of one dimension, held as plain tensors.

A band of rows holds whole blocks. A band of columns may end inside a block: its ranks then agree on the extremes of the
blocks, and each rank holds the scales of all blocks.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from shardopt.layout import (
    WHOLE,
    BlockGrid,
    Division,
    GridPartition,
    LocalBlocks,
    Placed,
    Region,
    Shard,
    assign,
)
from shardopt.layout.partition import Cut
from shardopt.sharding.exchange import RanksExchange


class Band(Shard):
    """This rank's part of a parameter of which all ranks hold equal parts of one dimension.

    Args:
        global_shape: the parameter's shape.
        dim: the dimension, 0 or 1.
    """

    def __init__(self, global_shape: tuple[int, ...], dim: int) -> None:
        size, ways = global_shape[dim], dist.get_world_size()
        ends = [min(number * -(-size // ways), size) for number in range(ways + 1)]
        self._dim, self._bounds = dim, list(pairwise(ends))
        self._ranks = RanksExchange((dist.group.WORLD,), torch.device("cpu"))
        start, end = self._bounds[self._ranks.rank]
        super().__init__(global_shape, (*global_shape[:dim], end - start, *global_shape[dim + 1 :]))
        self.indices = tuple(
            (((start, end),) if end > start else ()) if place == dim else ((0, extent),)
            for place, extent in enumerate(global_shape)
        )
        self.cuts_rows = dim > 0

    @property
    def holders(self) -> RanksExchange:
        return self._ranks

    @property
    def row_owners(self) -> RanksExchange | None:
        return self._ranks if self.cuts_rows else None

    @property
    def parts(self) -> RanksExchange:
        return self._ranks

    @property
    def division(self) -> Division:
        width = self.row_numel
        inner = math.prod(self.global_shape[self._dim + 1 :])
        regions = [
            Region(start * inner, 1, (end - start) * inner, width)
            if self._dim == 0
            else Region(start * inner, self.global_shape[0], (end - start) * inner, width)
            for start, end in self._bounds
        ]
        return Division(self._ranks, tuple(regions))

    @property
    def partition(self) -> Placed:
        return Placed(GridPartition((Cut(self._dim, len(self._bounds), 1),)), self._ranks.rank)

    def scales_partition(self, grid: BlockGrid) -> Placed:
        return WHOLE if self.cuts_rows else self.partition

    def local_blocks(self, grid: BlockGrid) -> LocalBlocks:
        return LocalBlocks(0, grid.blocks_per_row, self.row_owners)

    def part(self, whole: Tensor) -> Tensor:
        start, end = self._bounds[self._ranks.rank]
        return whole.narrow(self._dim, start, end - start).contiguous()

    def scales_part(self, whole: Tensor, grid: BlockGrid) -> Tensor:
        return whole if self.cuts_rows else self.part(whole)


def band_of(whole: Tensor, dim: int) -> torch.nn.Parameter:
    """This rank's band of a tensor that all ranks have."""
    shard = Band(tuple(whole.shape), dim)
    param = torch.nn.Parameter(shard.part(whole.detach()).clone())
    assign(param, shard)
    return param
