"""The one new file of a new kind of shard: bands, equal parts of one dimension, held as plain tensors.

A band of rows holds whole blocks. A band of columns may end inside a block: its ranks then agree on the extremes of the
blocks, and each rank holds the scales of all blocks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardopt.layout import GridPartition, Shard, assign
from shardopt.layout.partition import Cut
from shardopt.sharding.rank_group import TorchRankGroup


class Band(Shard):
    """This rank's part of a parameter of which all ranks hold equal parts of dimension 0 or 1."""

    def __init__(self, global_shape: tuple[int, ...], dim: int) -> None:
        ranks = TorchRankGroup((dist.group.WORLD,), torch.device("cpu"))
        bands = GridPartition((Cut(dim, ways=len(ranks.global_ranks), stride=1),))
        super().__init__(global_shape, bands, ranks.rank, ranks)


def band_of(whole: Tensor, dim: int) -> torch.nn.Parameter:
    """This rank's band of a tensor that all ranks have."""
    shard = Band(tuple(whole.shape), dim)
    param = torch.nn.Parameter(shard.part(whole.detach()).clone())
    assign(param, shard)
    return param
