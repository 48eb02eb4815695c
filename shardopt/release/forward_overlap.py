"""Steps that go on during the next forward pass: what reads parameters waits for their own steps only.

fully_shard reads them where it gathers them. Elsewhere each layer waits when it is called: the elements of the
outermost nn.ModuleList, nn.ModuleDict and nn.Sequential. Modules around wait for parameters in no layer: for their own,
and for those of modules inside, unless these were called by the last forward pass of training and so will wait
themselves. An output layer's parameters, which are stepped last, are then not waited for before the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, ParameterDict, ParameterList, Sequential

from shardopt.release.fsdp_groups import fsdp_groups
from shardopt.release.released import Weakly

_CONTAINERS = (ModuleList, ModuleDict, Sequential)
_NO_LAYERS = (*_CONTAINERS, ParameterList, ParameterDict)  # not called themselves, or for their elements


class ForwardOverlap:
    """Has whatever reads a model's parameters wait for their steps, until :meth:`remove`.

    Copies of the model are another one: they do not wait.

    Args:
        model: the wrapped model; None for what a pickled one becomes, which does nothing.
        released: takes the steps.
        params: those that it has, of the model's.
    """

    def __init__(
        self, model: Module | None = None, released: Weakly | None = None, params: Iterable[Tensor] = ()
    ) -> None:
        self._model = model
        self._released = released or Weakly()
        self._params = set(params)
        self._readers: dict[Module, list[Tensor]] = {}
        self._readers_inside: dict[Module, dict[Tensor, list[Module]]] = {}  # by the modules around them
        self._called: set[Module] = set()  # readers, by the last forward pass of training
        self._calling: set[Module] = set()  # the same of this forward pass, so far
        self._undo: list[Callable[[], object]] = []
        if model is not None:
            self._hook_into(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardOverlap:
        return self  # it looks at the module

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardOverlap, ()

    def remove(self) -> None:
        """Removes the hooks."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _hook_into(self, model: Module) -> None:
        _let_compiled_code_see_hooks()
        gathered: set[Tensor] = set()
        for group in fsdp_groups(model):
            group.before_gather.append(self._wait_for)
            self._undo.append(partial(group.before_gather.remove, self._wait_for))
            gathered.update(group.params)
        self._readers = readers(model, self._params - gathered)
        for module in self._readers:
            self._readers_inside[module] = _readers_inside(module, self._readers)
            self._undo.append(module.register_forward_pre_hook(self.begin, prepend=True).remove)
        self._undo.append(model.register_forward_hook(self.end).remove)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, module: Module, args: Any) -> None:
        """A forward pre-hook of what reads parameters."""
        if module is self._model:
            self._calling = set()
        self._calling.add(module)
        params, inside = self._readers.get(module, ()), self._readers_inside.get(module, {})
        if torch.is_grad_enabled():  # otherwise nothing would notice a module's parameters read without a call
            params = [p for p in params if p not in inside or not self._called.issuperset(inside[p])]
        self._wait_for(params)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, module: Module, args: Any, output: Any) -> None:
        """A forward hook of the model."""
        if module is self._model and (released := self._released()):
            released.end_forward()
            if torch.is_grad_enabled():
                self._called = self._calling

    def _wait_for(self, params: Iterable[Tensor]) -> None:
        if released := self._released():
            released.wait_for(param for param in params if param in self._params)


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
