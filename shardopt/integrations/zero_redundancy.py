"""ZeroRedundancyOptimizer: the places of parameters among all that it has, which the optimizer inside does not see.

Stochastic rounding depends on them. One method is hooked into: ``add_param_group``, which the constructor calls too.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shardopt.layout import assign_place


def install(module: ModuleType) -> None:
    """Hooks into ``torch.distributed.optim.zero_redundancy_optimizer``."""
    optimizer_class = module.ZeroRedundancyOptimizer
    add = optimizer_class.add_param_group

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        for place, param in enumerate(param for group in self.param_groups for param in group["params"]):
            assign_place(param, place)

    optimizer_class.add_param_group = add_param_group
