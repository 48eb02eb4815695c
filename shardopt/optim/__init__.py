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

#: Every optimizer with float32 state unless ``codec`` says otherwise, by its name in configs: "adamw", ...
OPTIMIZERS: dict[str, type[ShardedOptimizer]] = {
    name.lower(): kind
    for name, kind in list(globals().items())
    if name in __all__ and kind is not ShardedOptimizer and not name.endswith("8bit")
}
