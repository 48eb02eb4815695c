"""Steps that go on during the next forward pass: what reads parameters waits for their own steps only.

fully_shard reads them where it gathers them. Elsewhere each layer waits when it is called: the elements of the
outermost nn.ModuleList, nn.ModuleDict and nn.Sequential. Modules around wait for parameters in no layer: for their own,
and for those of modules inside, unless these were called by the last forward pass of training and so will wait
themselves. An output layer's parameters, which are stepped last, are then not waited for before the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
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
    """Has whatever reads a model's parameters wait for their steps, until ``undo`` is called.

    Args:
        model: the wrapped model. Copies of it do not wait.
        released: takes the steps.

    Attributes:
        undo: functions that remove the hooks.
    """

    def __init__(self, model: Module, released: HeldParameters) -> None:
        _let_compiled_code_see_hooks()
        self._model, self._released = model, released
        self.undo: list[Callable[[], object]] = []
        self._called: set[Module] = set()  # readers, by the last forward pass of training
        self._calling: set[Module] = set()  # the same of this forward pass, so far
        gathered: set[Tensor] = set()
        wait_for, begin = Hook(released.wait_for), Hook(self._begin)
        for group in fsdp_groups(model):
            group.before_gather.append(wait_for)
            self.undo.append(partial(group.before_gather.remove, wait_for))
            gathered.update(group.params)
        self._readers = readers(model, set(released.params) - gathered)
        self._readers_inside = {module: _readers_inside(module, self._readers) for module in self._readers}
        for module in self._readers:
            self.undo.append(module.register_forward_pre_hook(begin, prepend=True).remove)
        self.undo.append(model.register_forward_hook(Hook(self._end)).remove)

    def _begin(self, module: Module, args: Any) -> None:
        """A forward pre-hook of what reads parameters."""
        if module is self._model:
            self._calling = set()
        self._calling.add(module)
        params, inside = self._readers[module], self._readers_inside[module]
        if torch.is_grad_enabled():  # otherwise nothing would notice a module's parameters read without a call
            params = [p for p in params if p not in inside or not self._called.issuperset(inside[p])]
        self._released.wait_for(params)

    def _end(self, module: Module, args: Any, output: Any) -> None:
        """A forward hook of the model."""
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


def _readers_inside(module: Module, readers: Collection[Module]) -> dict[Tensor, list[Module]]:
    """The readers within a module by parameters that are theirs, and not the module's own."""
    readers_of: dict[Tensor, list[Module]] = {}
    own: set[Tensor] = set(module.parameters(recurse=False))
    for inner in module.modules():
        if inner is not module and inner in readers:
            for param in inner.parameters(recurse=False):
                if param not in own:
                    readers_of.setdefault(param, []).append(inner)
    return readers_of


def readers(model: Module, params: Collection[Tensor]) -> dict[Module, list[Tensor]]:
    """The modules that are to wait when they are called, and the parameters for which; one may have several readers."""
    params_by_reader: dict[Module, list[Tensor]] = {}

    def walk(module: Module) -> list[Tensor]:
        """Returns the parameters that are in no layer, which the modules around may read, too."""
        outside_layers: list[Tensor] = [param for param in module.parameters(recurse=False) if param in params]
        for child in module.children():
            if isinstance(module, _CONTAINERS) and not isinstance(child, _NO_LAYERS):
                params_by_reader[child] = [param for param in child.parameters() if param in params]
            else:
                outside_layers += walk(child)
        params_by_reader[module] = outside_layers
        return outside_layers

    walk(model)
    return {module: params_read for module, params_read in params_by_reader.items() if params_read}
