"""Hooks in fully_shard's parameter groups: before an all-gather, and to know whether more parts of a gradient follow.

Wrappers of methods are never removed, like DDP's communication hook: several releases may share a group, and end in any
order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module


class FsdpGroup:
    """Wraps methods of an ``FSDPParamGroup``: parameters that fully_shard all-gathers and reduce-scatters together.

    If a forward pass uses a module several times, fully_shard reduces gradients, and calls post-accumulate hooks, once
    per use whose inputs need gradients; gradients of uses without such inputs come at the end of the backward pass.
    The wrapped methods count the uses, for :attr:`expects_more`.

    Attributes:
        before_gather: functions to call with the sharded parameters before each all-gather, which reads them.
    """

    def __init__(self, group: Any) -> None:
        self.before_gather: list[Callable[[Iterable[Tensor]], None]] = []
        self._group = group
        self._wrapped_unshard, self._wrapped_post_backward = group.unshard, group.post_backward
        self._wrapped_register = group._register_post_backward_hook
        self.reset_counts()
        group.unshard, group.post_backward = self._unshard, self._post_backward
        group._register_post_backward_hook = self._register_post_backward_hook
        group._shardopt = self

    @property
    def params(self) -> list[Tensor]:
        """The group's parameters as DTensors, which are what the optimizer steps."""
        return [param.sharded_param for param in self._group.fsdp_params]

    @property
    def expects_more(self) -> bool:
        """Whether this backward pass may reduce another gradient of these parameters, to be added to the last one.

        Stays True if there are uses of both kinds: which reduction is the last is not known before the pass ends.
        """
        return self._pending_reductions > 0 or (self._reduces_per_use and self._reduces_at_end)

    def reset_counts(self) -> None:
        """Forgets the uses so far, at the start of a step: forward passes without a backward pass leave some behind."""
        self._pending_reductions = 0  # for uses of a module with inputs that need gradients
        self._reduces_per_use = self._reduces_at_end = False  # whether there were uses with such inputs, and without

    def _unshard(self, async_op: bool = False) -> None:
        """Replaces ``unshard()``, which starts the all-gather, to call :attr:`before_gather` first."""
        for call in self.before_gather:
            call(self.params)
        self._wrapped_unshard(async_op)

    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> Any:
        """Counts a use of a module; FSDP2 calls this in the forward pass, with the module's inputs."""
        result = self._wrapped_register(args, kwargs)
        if torch.is_grad_enabled():
            if result[0] is args and result[1] is kwargs:  # FSDP2 has found no input that needs a gradient
                self._reduces_at_end = True
            else:
                self._reduces_per_use = True
                self._pending_reductions += 1
        return result

    def _post_backward(self, *unused: Any) -> None:
        """Replaces ``post_backward()``, which reduces gradients and calls their hooks, to count it first.

        FSDP2 also calls it at the end of the pass, for uses that were not counted as pending: the count stays at 0.
        """
        self._pending_reductions = max(self._pending_reductions - 1, 0)
        self._wrapped_post_backward(*unused)


def torch_groups(module: Any) -> list[Any]:
    """The ``FSDPParamGroup`` objects of one module that fully_shard was called on; at most one before PyTorch 2.13."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def fsdp_groups(model: Module) -> Iterator[FsdpGroup]:
    """Gives the :class:`FsdpGroup` of each parameter group in a model; the first call wraps the groups' methods."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if nobody has imported it, no module was made by fully_shard
    if fsdp is None:
        return
    modules = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    for group in dict.fromkeys(group for module in modules for group in torch_groups(module)):  # modules may share one
        yield getattr(group, "_shardopt", None) or FsdpGroup(group)
