"""8-bit optimizers for sharded training: exact on every shard, at the speed of memory."""

from shardopt import integrations as _integrations  # noqa: F401  registers the kinds of shards
from shardopt.optim import (
    SGD,
    Adam,
    Adam8bit,
    AdamW,
    AdamW8bit,
    Lion,
    Lion8bit,
    MemoryReport,
    SGD8bit,
    memory_report,
)

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Lion",
    "Lion8bit",
    "MemoryReport",
    "SGD8bit",
    "memory_report",
]
