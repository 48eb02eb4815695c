"""torchtitan: an ``OptimizersContainer`` whose config names shardopt's optimizers beside torchtitan's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torchtitan.components import optimizer as _theirs

import shardopt
from shardopt.optim import ShardedOptimizer


class OptimizersContainer(_theirs.OptimizersContainer):  # type: ignore[misc]
    """torchtitan's container, which knows the names of shardopt's optimizers as well.

    A name that both have (``AdamW``) is torchtitan's: write ``AdamW8bit``. State dicts are flat, by the parameters'
    names, and load on any number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_theirs.OptimizersContainer.Config):  # type: ignore[misc]
        """The fields of torchtitan's config."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        try:
            theirs: Callable[..., Optimizer] = _theirs.OptimizersContainer._resolve_optimizer_factory(name)
        except NotImplementedError:  # torchtitan's way to say that it does not know the name
            ours = getattr(shardopt, name, None)
            if not (isinstance(ours, type) and issubclass(ours, ShardedOptimizer)):
                raise
            return ours
        return theirs


def adamw8bit(lr: float = 8e-4, **options: Any) -> OptimizersContainer.Config:
    """A config in which AdamW8bit has all parameters, with the defaults of torchtitan's ``default_adamw``.

    Args:
        lr: the learning rate.
        **options: other arguments of :class:`shardopt.AdamW8bit`.
    """
    kwargs = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **options}
    group = _theirs.ParamGroupConfig(pattern=r".*", optimizer_name="AdamW8bit", optimizer_kwargs=kwargs)
    return OptimizersContainer.Config(param_groups=[group])
