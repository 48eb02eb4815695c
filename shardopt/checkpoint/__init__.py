"""The portable checkpoint, for any sharding and number of ranks; other packages' states."""

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
