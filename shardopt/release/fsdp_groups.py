"""Hooks in fully_shard's parameter groups: called before an all-gather, and telling whether more gradients will come.

Hooks are never removed, like DDP's communication hook: several releases may share a group, and end in any order.
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
    """Wraps methods of an ``FSDPParamGroup``: parameters that fully_shard all-gathers and reduce-scatters together.

    If a forward pass uses a module several times, fully_shard reduces gradients, and calls post-accumulate hooks, once
    per use. The wrapped methods count the uses, for :attr:`expects_more`.

    Args:
        group: torch's ``FSDPParamGroup``.

    Attributes:
        before_gather: functions to call with the sharded parameters before each all-gather.
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
        """The group's parameters as DTensors, which are what the optimizer steps."""
        return [param.sharded_param for param in self._group.fsdp_params]

    @property
    def expects_more(self) -> bool:
        """Whether this backward pass may reduce another gradient of these parameters, to be added to the last one."""
        return self._coming > 0 or (self._comes_last and self._used)

    def restart(self) -> None:
        """Resets the counts of uses, as forward passes without a backward pass leave some behind."""
        self._coming = 0  # reduce-scatters to come: one per use of a module with an input that needs a gradient
        self._used = self._comes_last = False  # whether such uses, and uses without (reduced at the pass's end), were

    def _gather(self, async_op: bool = False) -> None:  # replaces unshard(), which starts the all-gather
        for call in self.before_gather:
            call(self.params)
        self._unshard(async_op)

    def _use(self, args: Any, kwargs: Any) -> Any:  # called in the forward pass, once per use of a module
        result = self._register(args, kwargs)
        if torch.is_grad_enabled():
            if result[0] is args and result[1] is kwargs:  # no input has a gradient
                self._comes_last = True
            else:
                self._coming, self._used = self._coming + 1, True
        return result

    def _reduce(self, *unused: Any) -> None:  # replaces post_backward(), which reduces gradients
        self._coming = max(self._coming - 1, 0)
        self._post_backward(*unused)


def groups_of(module: Any) -> list[Any]:
    """The ``FSDPParamGroup`` objects of one module that fully_shard was called on; at most one before PyTorch 2.13."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def fsdp_groups(model: Module) -> Iterator[FsdpGroup]:
    """Gives the :class:`FsdpGroup` of each parameter group in a model, made at the first call; none without FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it no module is one of fully_shard
    if fsdp is None:
        return
    modules = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    for group in dict.fromkeys(group for module in modules for group in groups_of(module)):  # several may share one
        yield getattr(group, "_shardopt", None) or FsdpGroup(group)
