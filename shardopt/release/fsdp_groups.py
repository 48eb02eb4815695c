"""Hooks of a release in fully_shard's parameter groups: a group says when it gathers, and whether more gradients come.

Both stay for good, as DDP's communication hook does: several releases may share a group, and end in any order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

BeforeGather = Callable[[Iterable[Tensor]], None]


class FsdpGroup:
    """A group of parameters that fully_shard gathers and reduces together.

    A module that is used several times in a forward pass has its gradient reduced, and its parameters' hooks called,
    once per use.

    Args:
        group: torch's ``FSDPParamGroup``.

    Attributes:
        before_gather: called with the sharded parameters before they are gathered.
    """

    def __init__(self, group: Any) -> None:
        self.before_gather: list[BeforeGather] = []
        self._group = group
        self._unshard, self._post_backward = group.unshard, group.post_backward
        self._register = group._register_post_backward_hook
        self.restart()
        group.unshard, group.post_backward = self._gather, self._reduce
        group._register_post_backward_hook = self._use
        group._shardopt = self

    @property
    def params(self) -> list[Tensor]:
        """The sharded parameters."""
        return [param.sharded_param for param in self._group.fsdp_params]

    @property
    def expects_more(self) -> bool:
        """Whether the gradient that was reduced last may be a part of what this backward pass gives."""
        return self._coming > 0 or (self._comes_last and self._used)

    def restart(self) -> None:
        """Forgets forward passes that no backward pass has followed."""
        self._coming = 0  # reductions to come, one per use of a module whose inputs need a gradient
        self._used = self._comes_last = False  # whether there were such uses; others, at the end of the pass

    def _gather(self, async_op: bool = False) -> None:
        for call in self.before_gather:
            call(self.params)
        self._unshard(async_op)

    def _use(self, args: Any, kwargs: Any) -> Any:
        result = self._register(args, kwargs)
        if torch.is_grad_enabled():
            if result[0] is args and result[1] is kwargs:  # no input has a gradient
                self._comes_last = True
            else:
                self._coming, self._used = self._coming + 1, True
        return result

    def _reduce(self, *unused: Any) -> None:
        self._coming = max(self._coming - 1, 0)
        self._post_backward(*unused)


def groups_of(module: Any) -> list[Any]:
    """The groups of parameters of a module of fully_shard. PyTorch before 2.13 has one at most."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def fsdp_groups(model: Module) -> Iterator[FsdpGroup]:
    """The groups of a model; none where fully_shard was not called."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it no module is one of fully_shard
    if fsdp is None:
        return
    modules = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    for group in dict.fromkeys(group for module in modules for group in groups_of(module)):  # several may share one
        yield getattr(group, "_shardopt", None) or FsdpGroup(group)
