"""The optimizer classes, one module per family of update rules, and clipping, param groups and state dict loading."""

from shardopt.optim.adam import Adam, Adam4bit, Adam8bit, AdamW, AdamW4bit, AdamW8bit
from shardopt.optim.adam_kin import (
    ADOPT,
    LAMB,
    Adamax,
    Adamax8bit,
    ADOPT8bit,
    LAMB8bit,
    NAdam,
    NAdam8bit,
    RAdam,
    RAdam8bit,
    StableAdamW,
    StableAdamW8bit,
)
from shardopt.optim.averages import Adan, Adan8bit, AdEMAMix, AdEMAMix8bit
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.momentum import LARS, SGD, LARS8bit, Lion, Lion8bit, SGD8bit, Signum, Signum8bit
from shardopt.optim.muon import Muon, Muon8bit, NorMuon, NorMuon8bit
from shardopt.optim.prodigy import Prodigy, Prodigy8bit
from shardopt.optim.squares import Adagrad, Adagrad8bit, RMSprop, RMSprop8bit

__all__ = [
    "ADOPT",
    "LAMB",
    "LARS",
    "SGD",
    "ADOPT8bit",
    "AdEMAMix",
    "AdEMAMix8bit",
    "Adagrad",
    "Adagrad8bit",
    "Adam",
    "Adam4bit",
    "Adam8bit",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "Adamax",
    "Adamax8bit",
    "Adan",
    "Adan8bit",
    "LAMB8bit",
    "LARS8bit",
    "Lion",
    "Lion8bit",
    "Muon",
    "Muon8bit",
    "NAdam",
    "NAdam8bit",
    "NorMuon",
    "NorMuon8bit",
    "Prodigy",
    "Prodigy8bit",
    "RAdam",
    "RAdam8bit",
    "RMSprop",
    "RMSprop8bit",
    "SGD8bit",
    "ShardedOptimizer",
    "Signum",
    "Signum8bit",
    "StableAdamW",
    "StableAdamW8bit",
]

#: Every optimizer by its name in configs: "adamw" with float32 state, "adamw8bit", "adamw4bit", ...
OPTIMIZERS: dict[str, type[ShardedOptimizer]] = {
    name.lower(): kind for name, kind in list(globals().items()) if name in __all__ and kind is not ShardedOptimizer
}
