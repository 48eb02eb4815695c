"""Tells which gradients come in several parts in one backward pass, so that none is stepped before the last part."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Module

from shardopt.release.fsdp_groups import FsdpGroup, fsdp_groups

_BACKWARD, _APPLY = torch.autograd.backward.__code__, BackwardCFunction.apply.__code__


class GradientParts:
    """Knows of two sources of parts: fully_shard's reductions, one per use of a module, and reentrant checkpoints.

    A reentrant checkpoint is a backward pass within the backward pass, which adds its part. In the forward pass it
    calls modules without gradients. Parameters of modules that are called so, and more than once in all, may get
    several parts; so may those that get a gradient within the backward pass though no module of theirs was called so.
    These are left to ``step()``, except where as many calls gave one part in an earlier step. Hooks that count calls
    are removed after the first step if there was no checkpoint.
    """

    def __init__(self) -> None:
        self._groups: dict[Tensor, FsdpGroup] = {}
        self.params: set[Tensor] = set()  # those that have a hook which is called when a part has come
        self._owners: dict[Module, list[Tensor]] = {}
        self.undo = ExitStack()  # removes the hooks
        self._counts_calls = self._has_checkpoints = False
        self._calls: Counter[Module] = Counter()  # in forward passes of training since the last backward pass
        self._checkpointed: set[Module] = set()  # those called without gradients among them
        self._uses: dict[Tensor, int] = {}  # calls of checkpointed modules, by their parameters
        self._whole: dict[Tensor, int] = {}  # the most calls that gave one part
        self._left: dict[Tensor, int] = {}  # parameters that are left to this step(), and their calls
        self._parts: Counter[Tensor] = Counter()  # that these got in this backward pass
        self._several: set[Tensor] = set()  # those that got several in a backward pass of this step
        self._task, self._is_within = -1, False  # PyTorch's number of the running pass; whether it is in another

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientParts, ()  # copies of the model are not released

    def watch(self, model: Module, params: Collection[Tensor]) -> None:
        """Begins to watch a wrapped model.

        Args:
            model: the model.
            params: those of its parameters that have a hook which is called when a part has come.
        """
        self.params = set(params)
        self._groups = {param: group for group in fsdp_groups(model) for param in group.params if param in params}
        self.undo.callback(model.register_forward_pre_hook(self._begin_forward).remove)
        for module in model.modules():
            owned: list[Tensor] = [param for param in module.parameters(recurse=False) if param in params]
            if owned:
                self._owners[module] = owned
                self.undo.callback(module.register_forward_pre_hook(self._count_call).remove)

    def more_may_come(self, param: Tensor) -> bool:
        """Whether the parameter, which has just got a gradient, is to be left for the next part, or for ``step()``."""
        if self._calls:
            self._count_uses()
        if (self._uses or self._left or self._is_within_backward()) and param in self.params:
            uses = self._uses.get(param, 0)
            if uses > self._whole.get(param, 1) or (not uses and self._is_within_backward()):
                self._left[param] = max(self._left.get(param, 0), uses)
            if param in self._left:
                self._parts[param] += 1
                if self._parts[param] > 1:
                    self._several.add(param)
                return True
        group = self._groups.get(param) if self._groups else None
        return group is not None and group.expects_more

    def next_step(self, *, complete: bool) -> None:
        """Forgets this step's parts.

        Args:
            complete: whether its backward pass gave all of them.
        """
        for group in set(self._groups.values()):
            group.restart()
        if complete:
            if not self._has_checkpoints:
                self.undo.close()
            self._whole.update((p, uses) for p, uses in self._left.items() if uses and p not in self._several)
        self._uses = {}
        for seen in (self._calls, self._checkpointed, self._left, self._parts, self._several):
            seen.clear()

    def _begin_forward(self, module: Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._counts_calls = torch.is_grad_enabled()

    def _count_call(self, module: Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not self._counts_calls:
            return
        if torch._C._current_graph_task_id() == -1:  # not a call that computes again
            self._calls[module] += 1
            if not torch.is_grad_enabled():
                self._checkpointed.add(module)
                self._has_checkpoints = True

    def _count_uses(self) -> None:
        checkpointed = {param for module in self._checkpointed for param in self._owners[module]}
        uses: Counter[Tensor] = Counter()
        for module, count in self._calls.items():
            uses.update({param: count for param in self._owners[module] if param in checkpointed})
        self._uses = uses
        for seen in (self._calls, self._checkpointed, self._parts):
            seen.clear()

    def _is_within_backward(self) -> bool:
        """Whether the running backward pass is one within a backward pass: all of its calls are."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            codes = [frame.f_code for frame, _ in walk_stack(sys._getframe())]
            is_within = _BACKWARD in codes and _APPLY in codes[codes.index(_BACKWARD) :]
            self._task, self._is_within = task, is_within
        return self._is_within
