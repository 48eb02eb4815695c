"""The names of a model's parameters in the bare model, and their numbers, on which stochastic rounding depends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count

from torch import Tensor
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

from shardopt.layout.flat import FlatBuffer
from shardopt.layout.shard import assigned

#: Submodules that stand for the module around them: FSDP1, activation checkpointing, torch.compile.
_TRANSPARENT = frozenset(["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"])
#: Name of the attribute in which modules keep other names of their submodules.
_CHILD_NAMES = "_shardopt_child_names"
_STORED, _USED = "_shardopt_stored_number", "_shardopt_number"  # attributes of parameters: their numbers


def canonical_modules(model: Module, *, all_names: bool = False) -> Iterator[tuple[str, Module]]:
    """All modules, outer ones first, with the prefix of their parameters' names ("" or "layers.0.").

    Args:
        model: the model.
        all_names: whether to give a shared module under each of its names, not under its first one only.
    """
    seen: set[int] = set()

    def walk(module: Module, prefix: str) -> Iterator[tuple[str, Module]]:
        if id(module) in seen and not all_names:
            return
        seen.add(id(module))
        yield prefix, module
        wraps = isinstance(module, DataParallel | DistributedDataParallel)
        names = getattr(module, _CHILD_NAMES, {})
        for name, child in module._modules.items():
            if child is not None:
                transparent = name in _TRANSPARENT or (wraps and name == "module")
                yield from walk(child, prefix if transparent else f"{prefix}{names.get(name, name)}.")

    return walk(model, "")


def bare_name(name: str) -> str:
    """A parameter's name from ``named_parameters()`` of a wrapped model, without the wrappers' parts."""
    parts = [part for part in name.removeprefix("module.").split(".") if part not in _TRANSPARENT]
    return ".".join(parts)


def name_children(module: Module, names: Mapping[str, str]) -> None:
    """Gives submodules other names in :func:`canonical_modules`, by name: theirs must differ from other ranks'."""
    setattr(module, _CHILD_NAMES, dict(names))


def parameter_names(model: Module) -> dict[str, Tensor]:
    """The parameters by their fully qualified names in the bare model, in its order; a shared one by its first name."""
    return {names[0]: param for param, names in all_parameter_names(model).items()}


def all_parameter_names(model: Module) -> dict[Tensor, list[str]]:
    """The names of each parameter, in the bare model's order; a shared one has several."""
    names: dict[Tensor, list[str]] = {}
    for prefix, module in canonical_modules(model, all_names=True):
        for name, param in module._parameters.items():
            if param is not None:
                names.setdefault(param, []).append(prefix + name)
    return names


def number_parameters(model: Module) -> None:
    """Stores with each parameter its index among all of the bare model's; a flat buffer's segments have theirs already.

    Steps use the indices after :func:`use_numbers` only: a table of param groups that one rank prints must not change
    the noise of an optimizer there.

    Args:
        model: the model, which :func:`shardopt.layout.read_model` must have read.
    """
    params = parameter_names(model).values()
    flat = [buffer for param in params if isinstance(buffer := assigned(param), FlatBuffer)]
    taken = {segment.number for buffer in flat for segment in buffer.segments}
    free = (number for number in count() if number not in taken)
    for param in params:
        if not isinstance(assigned(param), FlatBuffer):
            setattr(param, _STORED, next(free))


def use_numbers(params: Iterable[Tensor]) -> None:
    """Has steps of these parameters use the indices that were stored last, if any."""
    for param in params:
        if hasattr(param, _STORED):
            setattr(param, _USED, getattr(param, _STORED))


def give_numbers(params: Iterable[Tensor], numbers: Iterable[int | None]) -> None:
    """Has steps of these parameters use these indices: copies take those of the optimizer they were copied from."""
    for param, number in zip(params, numbers, strict=True):
        if number is not None:
            setattr(param, _USED, number)


def number_of(param: Tensor) -> int | None:
    """The parameter's index in the model, which seeds its stochastic rounding; None before :func:`use_numbers`."""
    return getattr(param, _USED, None)
