"""How parameters are cut into quantization blocks and sharded over ranks: block grids, shards, rank groups."""

from shardopt.layout.block_grid import BlockGrid, Rectangle, is_quantized
from shardopt.layout.flat import FlatBuffer, FlatRange, FlatScales, FlatShard, Segment
from shardopt.layout.kinds import Engines, Kind, copies_in, engines_of, read_model, register, shard_of
from shardopt.layout.names import number_of, number_parameters, use_numbers
from shardopt.layout.partition import WHOLE, GridPartition, PlacedPartition, RangePartition, contiguous_ranges
from shardopt.layout.rank_group import HoldersForSums, RankGroup, all_or_none, all_reduce_any, meet, reduce_together
from shardopt.layout.shard import Shard, UnknownShardError, assign, assigned, keep_float32_state, keeps_float32_state
