"""Where blocks lie and which of them this rank holds."""

from shardopt.layout.block_grid import BlockGrid, Rectangle, is_quantized, rectangles
from shardopt.layout.shard import Exchange, LocalBlocks, Shard, register, shard_of

__all__ = [
    "BlockGrid",
    "Exchange",
    "LocalBlocks",
    "Rectangle",
    "Shard",
    "is_quantized",
    "rectangles",
    "register",
    "shard_of",
]
