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

from shardopt.release.backward import Hook
from shardopt.release.fsdp_groups import fsdp_groups

if TYPE_CHECKING:
    from shardopt.release.overlapped import OverlappedRelease

_CONTAINERS = (ModuleList, ModuleDict, Sequential)
_NO_LAYERS = (*_CONTAINERS, ParameterList, ParameterDict)  # modules that are not called, but hold what is used


class ForwardOverlap:
    """Registers hooks in a model, so that whatever reads a parameter first waits until its pending step is done.

    Copies of the model do not wait. ``undo`` gets callbacks that remove the hooks when it is closed.
    """

    def __init__(self, model: Module, release: OverlappedRelease, undo: ExitStack) -> None:
        _let_compiled_code_see_hooks()
        self._model, self._release = model, release
        self._called_last: set[Module] = set()  # waiting modules that the last training forward pass called
        self._called_now: set[Module] = set()  # waiting modules that the running forward pass has called so far
        gathered: set[Tensor] = set()
        before_gather, before_module = Hook(release.wait_for_steps), Hook(self._before_module)
        for group in fsdp_groups(model):
            group.before_gather.append(before_gather)
            undo.callback(group.before_gather.remove, before_gather)
            gathered.update(group.params)
        self._params_by_reader, self._layers = waiting_modules(model, set(release.params) - gathered)
        self._owners: dict[Tensor, list[Module]] = {}  # waiting modules that have the parameter directly
        for module in self._params_by_reader:
            for param in module.parameters(recurse=False):
                self._owners.setdefault(param, []).append(module)
            # Before the users' hooks, which may read the parameters.
            undo.callback(module.register_forward_pre_hook(before_module, prepend=True).remove)
        undo.callback(model.register_forward_hook(Hook(self._after_model)).remove)

    def _before_module(self, module: Module, args: Any) -> None:
        """Waits for the steps of the parameters that a module may read: the forward pre-hook of waiting modules."""
        if module is self._model:
            self._called_now = set()
        self._called_now.add(module)
        params = self._params_by_reader.get(module, [])  # none in a shallow copy of a module, which has its hooks
        # Layers wait for all of their parameters. So do other modules in evaluation: no backward pass would notice a
        # parameter that was read too early because its module is not called.
        if torch.is_grad_enabled() and module not in self._layers:
            # Others leave parameters of submodules that will be called to these, which will wait for them.
            owners = ((param, self._owners[param]) for param in params)
            params = [param for param, own in owners if module in own or not self._called_last.issuperset(own)]
        self._release.wait_for_steps(params)

    def _after_model(self, module: Module, args: Any, output: Any) -> None:
        """Waits for all remaining steps at the end of the model's forward pass; ignores calls by shallow copies."""
        if module is not self._model:
            return
        self._release.end_forward()
        if torch.is_grad_enabled():
            self._called_last = self._called_now


def _let_compiled_code_see_hooks() -> None:
    """Makes Dynamo recompile when a module's hooks change: by default it does not guard on them.

    Otherwise code compiled before, for the model or another instance of its class, would not wait for steps.
    """
    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()


def waiting_modules(model: Module, params: Collection[Tensor]) -> tuple[dict[Module, list[Tensor]], set[Module]]:
    """Maps the modules that must wait when called to those of ``params`` they wait for; returns also the set of layers.

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
