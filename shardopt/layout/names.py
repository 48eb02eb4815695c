"""Parameters' names without prefixes of wrappers such as FSDP1, and their indices, which seed stochastic rounding."""

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
#: Attributes with a parameter's index: as number_parameters stored it, and as steps use it after use_numbers.
_STORED, _USED = "_shardopt_stored_number", "_shardopt_number"


def canonical_modules(model: Module, *, all_names: bool = False) -> Iterator[tuple[str, Module]]:
    """All modules, outer ones first, with the prefix ("" or "layers.0.") of their parameters' names in the bare model.

    A module that several modules share comes once, under its first name, or with ``all_names`` under each name.
    """
    seen: set[int] = set()

    def walk(module: Module, prefix: str) -> Iterator[tuple[str, Module]]:
        if id(module) in seen and not all_names:
            return
        seen.add(id(module))
        yield prefix, module
        is_ddp = isinstance(module, DataParallel | DistributedDataParallel)
        new_names = getattr(module, _CHILD_NAMES, {})
        for name, child in module._modules.items():
            if child is not None:
                is_transparent = name in _TRANSPARENT or (is_ddp and name == "module")
                yield from walk(child, prefix if is_transparent else f"{prefix}{new_names.get(name, name)}.")

    return walk(model, "")


def bare_name(name: str) -> str:
    """A parameter's name from ``named_parameters()`` of a wrapped model, without the wrappers' parts."""
    parts = [part for part in name.removeprefix("module.").split(".") if part not in _TRANSPARENT]
    return ".".join(parts)


def name_children(module: Module, names: Mapping[str, str]) -> None:
    """Has :func:`canonical_modules` rename submodules (``{old: new}``), as each rank counts its MoE experts from 0."""
    setattr(module, _CHILD_NAMES, dict(names))


def parameter_names(model: Module) -> dict[str, Tensor]:
    """Parameters by fully qualified name in the bare model, in its order; a shared parameter by its first name."""
    return {names[0]: param for param, names in all_parameter_names(model).items()}


def all_parameter_names(model: Module) -> dict[Tensor, list[str]]:
    """All names of each parameter, in the bare model's order; a parameter that modules share has several."""
    names: dict[Tensor, list[str]] = {}
    for prefix, module in canonical_modules(model, all_names=True):
        for name, param in module._parameters.items():
            if param is not None:
                names.setdefault(param, []).append(prefix + name)
    return names


def number_parameters(model: Module) -> None:
    """Stores with each parameter of a model that ``read_model`` has read its index in the bare model.

    Segments of flat buffers have theirs already. Steps use the indices only after :func:`use_numbers`: a rank that
    numbers a model just to print a table of its param groups must round as the other ranks do.
    """
    shards = {param: assigned(param) for param in parameter_names(model).values()}
    buffers = [shard for shard in shards.values() if isinstance(shard, FlatBuffer)]
    taken = {segment.number for buffer in buffers for segment in buffer.segments}
    free_numbers = (number for number in count() if number not in taken)
    for param, shard in shards.items():
        if not isinstance(shard, FlatBuffer):
            setattr(param, _STORED, next(free_numbers))


def use_numbers(params: Iterable[Tensor]) -> None:
    """Lets steps seed these parameters' stochastic rounding with indices that :func:`number_parameters` stored."""
    for param in params:
        if hasattr(param, _STORED):
            setattr(param, _USED, getattr(param, _STORED))


def set_numbers(params: Iterable[Tensor], numbers: Iterable[int | None]) -> None:
    """Sets the indices that seed parameters' stochastic rounding: a copied optimizer keeps the original's indices."""
    for param, number in zip(params, numbers, strict=True):
        if number is not None:
            setattr(param, _USED, number)


def number_of(param: Tensor) -> int | None:
    """The parameter's index in the model, which seeds its stochastic rounding; None before :func:`use_numbers`."""
    return getattr(param, _USED, None)
