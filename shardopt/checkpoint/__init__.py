"""Saves and loads checkpoints under any sharding and number of ranks, and imports other packages' optimizer state."""

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.importing import ImportReport, Outcome, import_state
from shardopt.checkpoint.index import read_header
from shardopt.checkpoint.portable import Loaded, async_save, load, save

__all__ = [
    "CheckpointError",
    "ImportReport",
    "Loaded",
    "Outcome",
    "async_save",
    "import_state",
    "load",
    "read_header",
    "save",
]
