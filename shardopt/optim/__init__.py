"""The optimizers: a base and a file per rule."""

from shardopt.optim.adam import Adam, Adam8bit, AdamW, AdamW8bit
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.lion import Lion, Lion8bit
from shardopt.optim.sgd import SGD, SGD8bit

__all__ = [
    "SGD",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Lion",
    "Lion8bit",
    "SGD8bit",
    "ShardedOptimizer",
]
