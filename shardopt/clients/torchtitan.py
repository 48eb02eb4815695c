"""torchtitan: configs that select shardopt's optimizers by name, and a replacement of its gradient clipping.

torchtitan 0.3 selects an optimizer by its name in a ``ParamGroupConfig``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torchtitan.components import optimizer as _theirs

import shardopt
from shardopt.optim import ShardedOptimizer


def _optimizer_class(name: str) -> type[ShardedOptimizer]:
    """The optimizer of shardopt with this class name; ValueError if there is none."""
    value = getattr(shardopt, name, None)
    if isinstance(value, type) and issubclass(value, ShardedOptimizer):
        return value
    raise ValueError(
        f"got name={name!r}, expected an optimizer of shardopt such as 'AdamW8bit'; for torchtitan's give "
        "container_config() its own config"
    )


class OptimizersContainer(_theirs.OptimizersContainer):  # type: ignore[misc]
    """torchtitan's container of optimizers, extended to find shardopt's optimizers by name.

    A name that both packages have (``AdamW``) means torchtitan's: write ``shardopt.AdamW`` for the other.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_theirs.OptimizersContainer.Config):  # type: ignore[misc]
        """The fields of torchtitan's config, unchanged, in a class that belongs to this container."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        """Overrides torchtitan's look-up of a config's ``optimizer_name``, which goes first."""
        try:
            theirs: Callable[..., Optimizer] = _theirs.OptimizersContainer._resolve_optimizer_factory(name)
        except NotImplementedError:  # torchtitan's way to say that it does not know the name
            return _optimizer_class(name.removeprefix("shardopt."))
        return theirs


def param_group(pattern: str, name: str, **options: Any) -> Any:
    """Makes a ``ParamGroupConfig``, for :func:`container_config`: an optimizer for parameters whose names match.

    Args:
        pattern: a regular expression, searched in parameters' names; a parameter is in the first group that matches.
        name: the name of an optimizer of shardopt, such as ``"AdamW8bit"``.
        **options: arguments of the optimizer, such as ``lr``.

    Raises:
        ValueError: shardopt has no such optimizer.
    """
    _optimizer_class(name)
    return _theirs.ParamGroupConfig(pattern=pattern, optimizer_name=f"shardopt.{name}", optimizer_kwargs=options)


def container_config(*groups: Any) -> Any:
    """Makes the ``OptimizersContainer.Config`` of param groups, to be torchtitan's optimizer config.

    Args:
        *groups: results of :func:`param_group`, or torchtitan's own. State dicts are flat, keyed by parameters' names,
            and load on any number of ranks.
    """
    return OptimizersContainer.Config(param_groups=list(groups))


def adamw8bit(lr: float = 8e-4, **options: Any) -> Any:
    """Makes a config by which AdamW8bit steps all parameters, with the default options of torchtitan's AdamW.

    Args:
        lr: the learning rate.
        **options: other arguments of :class:`shardopt.AdamW8bit`.
    """
    defaults = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return container_config(param_group(r".*", "AdamW8bit", lr=lr, **defaults | options))


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

    Usage, before training: ``torchtitan.distributed.utils.clip_grad_norm_ = clip_grad_norm_``. ``foreach`` is ignored,
    and so is ``ep_enabled``, as the device meshes of experts' parameters tell how they are sharded.

    Raises:
        ValueError: ``pp_mesh`` is not None: the stages of a pipeline have other parameters on each rank.
    """
    if pp_mesh is not None:
        raise ValueError(
            "got pipeline parallelism with shardopt's clip_grad_norm_, expected every rank to hold parts of all "
            "parameters; keep torchtitan's clip_grad_norm_"
        )
    return shardopt.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
