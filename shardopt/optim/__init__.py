"""The optimizers: a base and a file per rule."""

from shardopt.optim.adam import Adam, Adam8bit, AdamW, AdamW8bit
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.lion import Lion, Lion8bit
from shardopt.optim.memory import MemoryReport, MemoryUse, memory_report
from shardopt.optim.numerics import check_numerics
from shardopt.optim.sgd import SGD, SGD8bit

__all__ = [
    "SGD",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Lion",
    "Lion8bit",
    "MemoryReport",
    "MemoryUse",
    "SGD8bit",
    "ShardedOptimizer",
    "check_numerics",
    "memory_report",
]
