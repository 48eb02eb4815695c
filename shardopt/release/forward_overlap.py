"""Hooks by which the next forward pass, overlapped with steps, waits for a parameter's step before reading it.

With fully_shard the wait is before the all-gather. Elsewhere each layer waits when it is called; layers are elements of
the outermost nn.ModuleList, nn.ModuleDict or nn.Sequential. A module that contains layers waits for the parameters
outside of them, its own and its submodules', except submodules that the last training forward pass called: these will
wait when called. So the first layer does not wait for the output layer, whose parameters are stepped last.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, ParameterDict, ParameterList, Sequential

from shardopt.release.fsdp_groups import fsdp_groups
from shardopt.release.released import Hook

if TYPE_CHECKING:
    from shardopt.release.held import HeldParameters

_CONTAINERS = (ModuleList, ModuleDict, Sequential)
_NO_LAYERS = (*_CONTAINERS, ParameterList, ParameterDict)  # not called themselves, or for their elements


class ForwardOverlap:
    """Registers hooks in a model, so that whatever reads a parameter first waits until its pending step is done.

    Args:
        model: the wrapped model. Copies of it do not wait.
        released: the parameters with their pending steps.
        undo: gets callbacks that remove the hooks when it is closed.
    """

    def __init__(self, model: Module, released: HeldParameters, undo: ExitStack) -> None:
        _let_compiled_code_see_hooks()
        self._model, self._released = model, released
        self._called: set[Module] = set()  # modules with a hook that the last training forward pass called
        self._calling: set[Module] = set()  # modules with a hook that the running forward pass has called so far
        gathered: set[Tensor] = set()
        wait_for, begin = Hook(released.wait_for), Hook(self._begin)
        for group in fsdp_groups(model):
            group.before_gather.append(wait_for)
            undo.callback(group.before_gather.remove, wait_for)
            gathered.update(group.params)
        self._readers, self._layers = waiting_modules(model, set(released.params) - gathered)
        self._owners: dict[Tensor, list[Module]] = {}  # modules with a hook that have the parameter directly
        for module in self._readers:
            for param in module.parameters(recurse=False):
                self._owners.setdefault(param, []).append(module)
            undo.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
        undo.callback(model.register_forward_hook(Hook(self._end)).remove)

    def _begin(self, module: Module, args: Any) -> None:
        """Waits for the steps of the parameters that a module may read: a forward pre-hook of layers and others."""
        if module is self._model:
            self._calling = set()
        self._calling.add(module)
        params, owners, called = self._readers.get(module, []), self._owners, self._called
        # In evaluation all are waited for: no backward pass would notice a parameter read without a module's call.
        if torch.is_grad_enabled() and module not in self._layers:
            params = [p for p in params if module in owners[p] or not called.issuperset(owners[p])]
        self._released.wait_for(params)

    def _end(self, module: Module, args: Any, output: Any) -> None:
        """Waits for all remaining steps at the end of the model's forward pass; ignores calls by shallow copies."""
        if module is not self._model:
            return
        self._released.end_forward()
        if torch.is_grad_enabled():
            self._called = self._calling


def _let_compiled_code_see_hooks() -> None:
    """Makes Dynamo recompile when a module's hooks change: by default it does not guard on them.

    Otherwise code compiled before, for the model or another instance of its class, would not wait for steps.
    """
    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()


def waiting_modules(model: Module, params: Collection[Tensor]) -> tuple[dict[Module, list[Tensor]], set[Module]]:
    """Decides which modules must wait when called, and for which of ``params``; returns also the set of layers.

    A layer waits for all parameters inside, other modules for those outside of layers: several may wait for one.
    """
    params_by_reader: dict[Module, list[Tensor]] = {}
    layers: set[Module] = set()

    def collect(module: Module) -> list[Tensor]:
        """Adds a module and its submodules. Returns its parameters outside of layers; parents wait for them, too."""
        outside_layers: list[Tensor] = [param for param in module.parameters(recurse=False) if param in params]
        for child in module.children():
            if isinstance(module, _CONTAINERS) and not isinstance(child, _NO_LAYERS):
                params_by_reader[child] = [param for param in child.parameters() if param in params]
                layers.add(child)
            else:
                outside_layers += collect(child)
        params_by_reader[module] = outside_layers
        return outside_layers

    collect(model)
    return {module: params_read for module, params_read in params_by_reader.items() if params_read}, layers
