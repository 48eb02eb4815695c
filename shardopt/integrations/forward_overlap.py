"""Steps that go on during the next forward pass: each unit of the model waits for its own parameters only.

Units are the modules that fully_shard has wrapped, and elsewhere the elements of the outermost nn.ModuleList,
nn.ModuleDict and nn.Sequential: usually the layers. What is in none of them is a unit of its own, the model. That the
parameters of a unit are read within its own forward pass only is what fully_shard asks for, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, ParameterDict, ParameterList, Sequential

from shardopt.optim.released import ReleasedParameters

_CONTAINERS = (ModuleList, ModuleDict, Sequential)
_NO_UNITS = (*_CONTAINERS, ParameterList, ParameterDict)  # not called themselves, or for their elements


def wait_in_forward(
    model: Module, released: ReleasedParameters, params: Collection[Tensor]
) -> Iterator[Callable[[], object]]:
    """Has forward passes of a model wait for steps, unit by unit.

    Its state dict is read and loaded only after all of them.

    Args:
        model: the wrapped model.
        released: takes the steps.
        params: those that it has, of the model's.

    Returns:
        How to end that.
    """
    known = set(params)
    units = {unit: [param for param in found if param in known] for unit, found in units_of(model).items()}

    # Functions, and looking at the module: deep copies of the model have the same hooks.
    def begin(module: Module, args: Any) -> None:
        for gathered in _gathered_with(module):
            released.wait_for(units.get(gathered, []))

    def end(module: Module, args: Any, output: Any) -> None:
        if module is model:
            released.end_forward()

    def wait(*_: Any) -> None:
        released.wait()

    for unit in units:
        yield unit.register_forward_pre_hook(begin, prepend=True).remove  # before fully_shard's, which gathers
    yield model.register_forward_hook(end, always_call=True).remove
    for module in model.modules():
        yield module.register_state_dict_pre_hook(wait).remove  # type: ignore[no-untyped-call]
        yield module.register_load_state_dict_pre_hook(wait).remove  # type: ignore[no-untyped-call]


def units_of(model: Module) -> dict[Module, list[Tensor]]:
    """The units of a model, and their parameters; those that are shared may be in several."""
    units: dict[Module, list[Tensor]] = {}

    def walk(module: Module, unit: Module) -> None:
        units.setdefault(unit, []).extend(module.parameters(recurse=False))
        for child in module.children():
            is_layer = unit is model and isinstance(module, _CONTAINERS) and not isinstance(child, _NO_UNITS)
            walk(child, child if _is_fsdp(child) or (is_layer and not _is_fsdp(unit)) else unit)

    walk(model, model)
    return units


def _is_fsdp(module: Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it no module is one of fully_shard
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _gathered_with(module: Any) -> list[Module]:
    """The modules whose parameters may be read as soon as one is called."""
    if not _is_fsdp(module):
        return [module]
    state = module._get_fsdp_state()
    return [other for found in (state, *state._states_to_forward_prefetch) for other in found._modules]
