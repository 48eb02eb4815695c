"""Tells which gradients come in several parts in one backward pass, so that none is stepped before the last part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from shardopt.release.fsdp_groups import FsdpGroup, fsdp_groups


class GradientParts:
    """Knows of two sources of parts: fully_shard's reductions, one per use of a module, and reentrant checkpoints.

    A reentrant checkpoint is a backward pass within the backward pass, which adds its part. In the forward pass it
    calls modules without gradients. Parameters of modules that are called so more than once, and of modules around
    them, may get several parts: the first step shows which do. Hooks that count calls are removed after it.

    Args:
        micro_batches: backward passes per step.
    """

    def __init__(self, micro_batches: int = 1) -> None:
        self._micro_batches = micro_batches
        self._groups: dict[Tensor, FsdpGroup] = {}
        self._owners: dict[Module, list[Tensor]] = {}
        self._undo: list[Callable[[], object]] = []
        self._counts_calls = False
        self._calls: Counter[Module] = Counter()
        self._suspects: set[Tensor] = set()
        self._parts: Counter[Tensor] = Counter()  # that suspects got in this step

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientParts, ()  # copies of the model are not released

    def watch(self, model: Module, params: Collection[Tensor]) -> None:
        """Begins to watch a wrapped model.

        Args:
            model: the model.
            params: those of its parameters that have a hook which is called when a part has come.
        """
        self._groups = {param: group for group in fsdp_groups(model) for param in group.params if param in params}
        self._undo.append(model.register_forward_pre_hook(self._begin_forward).remove)
        for module in model.modules():
            owned: list[Tensor] = [param for param in module.parameters(recurse=False) if param in params]
            if owned:
                self._owners[module] = owned
                self._undo.append(module.register_forward_pre_hook(self._count_call).remove)

    def more_may_come(self, param: Tensor) -> bool:
        """Whether the parameter, which has just got a gradient, is to be left for the next part, or for ``step()``."""
        if self._calls:
            self._suspect()
        if param in self._suspects:
            self._parts[param] += 1
            return True
        group = self._groups.get(param)
        return group is not None and group.expects_more

    def next_step(self, *, complete: bool) -> None:
        """Forgets this step's parts.

        Args:
            complete: whether its backward pass gave all of them.
        """
        for group in {id(group): group for group in self._groups.values()}.values():
            group.restart()
        if complete and self._undo:
            self._suspects = {param for param, count in self._parts.items() if count > self._micro_batches}
            self.remove()
        self._calls.clear()
        self._parts.clear()

    def remove(self) -> None:
        """Removes the hooks."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _begin_forward(self, module: Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._counts_calls = torch.is_grad_enabled()

    def _count_call(self, module: Module, args: Any) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not self._counts_calls:
            return
        if torch._C._current_graph_task_id() == -1:  # not a call that computes again
            self._calls[module] += 1

    def _suspect(self) -> None:
        uses: Counter[Tensor] = Counter()
        for module, count in self._calls.items():
            uses.update(dict.fromkeys(self._owners[module], count))
        self._calls.clear()
        several = {param for param, count in uses.items() if count > 1}
        for module, owned in self._owners.items():
            if any(param in several for param in module.parameters()):
                self._suspects.update(owned)
