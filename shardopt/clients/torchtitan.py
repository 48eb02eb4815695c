"""torchtitan: an ``OptimizersContainer`` whose config names shardopt's optimizers, and clipping by the exact norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
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


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: Any = None,
    ep_enabled: bool = False,
) -> Tensor:
    """:func:`shardopt.clip_grad_norm_` for torchtitan's trainer, in place of torchtitan's own function.

    Usage, before training: ``torchtitan.distributed.utils.clip_grad_norm_ = clip_grad_norm_``.

    Args:
        parameters: see :func:`shardopt.clip_grad_norm_`.
        max_norm: see :func:`shardopt.clip_grad_norm_`.
        norm_type: see :func:`shardopt.clip_grad_norm_`.
        error_if_nonfinite: see :func:`shardopt.clip_grad_norm_`.
        foreach: ignored.
        pp_mesh: must be None: no pipeline parallelism.
        ep_enabled: ignored: experts are counted by their meshes.

    Returns:
        The norm: float32, 0-d.

    Raises:
        ValueError: ``pp_mesh`` is not None: the stages of a pipeline have other parameters on each rank.
    """
    if pp_mesh is not None:
        raise ValueError(
            "got pipeline parallelism with shardopt's clip_grad_norm_, expected every rank to hold parts of all "
            "parameters; keep torchtitan's clip_grad_norm_"
        )
    return shardopt.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
