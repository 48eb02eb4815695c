"""Gradients in 8 bits on the wire, for FSDP2 and DistributedDataParallel: half the bytes of bfloat16.

Opt-in, by one call after the model is wrapped: ``shardopt.comm.quantize_gradients(model)``. ``docs/gradients.md`` has
the definition, what it costs, and what it gives up: gradients have the same bits on any number of ranks no more.
"""

from shardopt.comm.all_reduce import all_reduce_8bit
from shardopt.comm.quantize import quantize_gradients
from shardopt.comm.reduce_scatter import ReduceScatter8bit

__all__ = ["ReduceScatter8bit", "all_reduce_8bit", "quantize_gradients"]
