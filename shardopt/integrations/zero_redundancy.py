"""ZeroRedundancyOptimizer: the places of parameters among all that it has, which the optimizer inside does not see.

Stochastic rounding depends on them. Two methods are hooked into: the one that makes the optimizer inside, and
``add_param_group``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shardopt.optim import ShardedOptimizer


def install(module: ModuleType) -> None:
    """Hooks into ``torch.distributed.optim.zero_redundancy_optimizer``."""
    optimizer_class = module.ZeroRedundancyOptimizer
    make, add = optimizer_class._init_local_optimizer, optimizer_class.add_param_group

    def _init_local_optimizer(self: Any) -> None:
        make(self)
        _tell_places(self)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        _tell_places(self)

    optimizer_class._init_local_optimizer = _init_local_optimizer
    optimizer_class.add_param_group = add_param_group


def _tell_places(outer: Any) -> None:
    inner = getattr(outer, "optim", None)  # not there yet while the first param groups are added
    if isinstance(inner, ShardedOptimizer):
        params = [param for group in outer.param_groups for param in group["params"]]
        inner.numbers.update((param, number) for number, param in enumerate(params))
