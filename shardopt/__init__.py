"""8-bit optimizers for sharded training: exact on every shard, at the speed of memory."""

import importlib as _importlib

from shardopt import integrations as _integrations  # noqa: F401  registers the kinds of shards
from shardopt.integrations.gradient_release import GradientRelease, release_gradients
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
    check_numerics,
    memory_report,
)
from shardopt.precision import cast_model, is_norm

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "GradientRelease",
    "Lion",
    "Lion8bit",
    "MemoryReport",
    "SGD8bit",
    "cast_model",
    "check_numerics",
    "is_norm",
    "memory_report",
    "release_gradients",
]


def __getattr__(name: str) -> object:
    """Imports ``shardopt.checkpoint`` when it is first used: torch.distributed.checkpoint takes half a second."""
    if name == "checkpoint":
        return _importlib.import_module("shardopt.checkpoint")
    raise AttributeError(f"module 'shardopt' has no attribute {name!r}")
