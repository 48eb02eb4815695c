"""The optimizer classes, one module per family of update rules, and clipping, param groups and state dict loading."""

# isort: off
from shardopt.optim.adam import Adam, Adam4bit, Adam8bit, AdamW, AdamW4bit, AdamW8bit
from shardopt.optim.adam_kin import ADOPT, LAMB, ADOPT8bit, Adamax, Adamax8bit, LAMB8bit
from shardopt.optim.adam_kin import NAdam, NAdam8bit, RAdam, RAdam8bit, StableAdamW, StableAdamW8bit
from shardopt.optim.averages import Adagrad, Adagrad8bit, AdEMAMix, AdEMAMix8bit, Adan, Adan8bit, RMSprop, RMSprop8bit
from shardopt.optim.averages import LARS, SGD, LARS8bit, Lion, Lion8bit, SGD8bit, Signum, Signum8bit
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.muon import Muon, Muon8bit, NorMuon, NorMuon8bit
from shardopt.optim.prodigy import Prodigy, Prodigy8bit
# isort: on

__all__ = ["Adam", "Adam4bit", "Adam8bit", "AdamW", "AdamW4bit", "AdamW8bit", "ShardedOptimizer"]
__all__ += ["ADOPT", "LAMB", "ADOPT8bit", "Adamax", "Adamax8bit", "LAMB8bit"]
__all__ += ["NAdam", "NAdam8bit", "RAdam", "RAdam8bit", "StableAdamW", "StableAdamW8bit"]
__all__ += ["AdEMAMix", "AdEMAMix8bit", "Adagrad", "Adagrad8bit", "Adan", "Adan8bit", "RMSprop", "RMSprop8bit"]
__all__ += ["LARS", "SGD", "LARS8bit", "Lion", "Lion8bit", "SGD8bit", "Signum", "Signum8bit"]
__all__ += ["Muon", "Muon8bit", "NorMuon", "NorMuon8bit", "Prodigy", "Prodigy8bit"]

#: Every optimizer by its name in configs: "adamw" with float32 state, "adamw8bit", "adamw4bit", ...
OPTIMIZERS: dict[str, type[ShardedOptimizer]] = {
    name.lower(): kind for name, kind in list(globals().items()) if name in __all__ and kind is not ShardedOptimizer
}
