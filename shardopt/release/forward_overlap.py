"""Steps that go on during the next forward pass: what reads parameters waits for their own steps only.

fully_shard reads them where it gathers them. Elsewhere each layer waits when it is called: the elements of the
outermost nn.ModuleList, nn.ModuleDict and nn.Sequential. Modules around wait for parameters in no layer: for their own,
and for those of modules inside, unless these were called by the last forward pass of training and so will wait
themselves. An output layer's parameters, which are stepped last, are then not waited for before the first layer.
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
    """Has whatever reads a model's parameters wait for their steps.

    Args:
        model: the wrapped model. Copies of it do not wait.
        released: takes the steps.
        undo: removes the hooks when it is closed.
    """

    def __init__(self, model: Module, released: HeldParameters, undo: ExitStack) -> None:
        _let_compiled_code_see_hooks()
        self._model, self._released = model, released
        self._called: set[Module] = set()  # readers, by the last forward pass of training
        self._calling: set[Module] = set()  # the same of this forward pass, so far
        gathered: set[Tensor] = set()
        wait_for, begin = Hook(released.wait_for), Hook(self._begin)
        for group in fsdp_groups(model):
            group.before_gather.append(wait_for)
            undo.callback(group.before_gather.remove, wait_for)
            gathered.update(group.params)
        self._readers, self._layers = waiting_modules(model, set(released.params) - gathered)
        self._owners: dict[Tensor, list[Module]] = {}  # the readers that have a parameter themselves
        for module in self._readers:
            for param in module.parameters(recurse=False):
                self._owners.setdefault(param, []).append(module)
            undo.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
        undo.callback(model.register_forward_hook(Hook(self._end)).remove)

    def _begin(self, module: Module, args: Any) -> None:
        """A forward pre-hook of what reads parameters."""
        if module is self._model:
            self._calling = set()
        self._calling.add(module)
        params, owners, called = self._readers.get(module, []), self._owners, self._called
        # In evaluation nothing would notice a module's parameters read without a call.
        if torch.is_grad_enabled() and module not in self._layers:
            params = [p for p in params if module in owners[p] or not called.issuperset(owners[p])]
        self._released.wait_for(params)

    def _end(self, module: Module, args: Any, output: Any) -> None:
        """A forward hook of the model, which its shallow copies have, too."""
        if module is not self._model:
            return
        self._released.end_forward()
        if torch.is_grad_enabled():
            self._called = self._calling


def _let_compiled_code_see_hooks() -> None:
    """Has Dynamo compile again where hooks differ: by default it guards on no module hooks.

    Code that it has compiled for the model before, or for another instance of its class, would not wait for steps.
    """
    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()


def waiting_modules(model: Module, params: Collection[Tensor]) -> tuple[dict[Module, list[Tensor]], set[Module]]:
    """The modules that wait when they are called, with the parameters that they wait for; and which modules are layers.

    Several modules may wait for one parameter.
    """
    params_by_reader: dict[Module, list[Tensor]] = {}
    layers: set[Module] = set()

    def collect(module: Module) -> list[Tensor]:
        """Adds the modules within one. Returns its parameters in no layer, which outer modules may read, too."""
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
