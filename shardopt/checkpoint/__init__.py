"""The portable checkpoint: any sharding, any number of ranks, bit for bit."""

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.portable import Loaded, async_save, load, save

__all__ = ["CheckpointError", "Loaded", "async_save", "load", "save"]
