"""Collects what one rank saves: its shards of the parameters, buffers and optimizer state, and the JSON header."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import describe_group
from shardopt.checkpoint.header import from_json, to_json
from shardopt.checkpoint.items import Chunks, Item, model_key, tensors_of
from shardopt.checkpoint.wording import one_line
from shardopt.kernels.memory import check_storage, readable
from shardopt.layout import FlatBuffer, FlatShard, Shard, assigned, engines_of, read_model, shard_of
from shardopt.layout.names import all_parameter_names, canonical_modules, parameter_names
from shardopt.optim import ShardedOptimizer
from shardopt.optim.internals import wait_for_steps
from shardopt.report.memory import owner_of
from shardopt.wrapper.optimizer import QuantizedState


class Contents(NamedTuple):
    """The header and the tensors that one rank saves.

    Attributes:
        header: a dict that JSON can hold.
        tensors: the tensors by their names in the checkpoint, each with this rank's part of it, which may be empty.
        unequal: names of tensors that may differ between ranks (buffers); the first rank that has one saves it.
    """

    header: dict[str, Any]
    tensors: Mapping[str, Chunks]
    unequal: Collection[str] = ()


class UnwrappedOptimizer(NamedTuple):
    """The optimizer that a checkpoint saves and loads, without its wrappers.

    Attributes:
        all_groups: the wrapper's param groups, including parameters whose state other ranks keep.
        optimizer: the optimizer that keeps this rank's state: under a ZeroRedundancyOptimizer, its inner optimizer.
    """

    all_groups: list[dict[str, Any]]
    optimizer: Any

    @classmethod
    def of(cls, optimizer: Optimizer) -> UnwrappedOptimizer:
        """Finds the optimizer that keeps the state, also in a ZeroRedundancyOptimizer or Accelerate's wrapper.

        Raises TypeError if it is neither shardopt's nor the result of quantize_state.
        """
        inner = owner_of(optimizer)
        if not isinstance(inner, ShardedOptimizer | QuantizedState):
            raise TypeError(
                f"got an optimizer of {type(optimizer).__name__}, expected one of shardopt's, or the result of "
                "quantize_state; save others with torch.distributed.checkpoint"
            )
        return cls(optimizer.param_groups, inner)

    @property
    def internals(self) -> Any:
        """Reads and replaces the optimizer's state: ``optim.internals.Internals``, or quantize_state's ``Entries``."""
        return self.optimizer._internals


def check_arguments(model: object, optimizer: object) -> None:
    """Raises TypeError for a state dict in place of the model or optimizer, and for an optimizer as the model."""
    if isinstance(model, Mapping) or isinstance(optimizer, Mapping):
        which = "model; pass the module" if isinstance(model, Mapping) else "optimizer; pass the optimizer"
        raise TypeError(f"got a state dict for the {which} itself, which knows how its tensors are sharded")
    if not isinstance(model, Module):
        raise TypeError(f"got {type(model).__name__} for the model, expected a module; pass path, model, optimizer")


@contextmanager
def opened(model: Module, optimizer: Optimizer | None) -> Iterator[tuple[Module, Optimizer | None]]:
    """Yields the model and optimizer unchanged, or an engine's (DeepSpeed's) inner model and its own optimizer."""
    engines = engines_of(model)
    if engines is None:
        yield model, optimizer
        return
    if optimizer is not None and not engines.has_optimizer(model, optimizer):
        raise TypeError(
            f"got an optimizer beside a {engines.name} engine that is not the engine's, expected the engine only; "
            "leave the optimizer out"
        )
    with engines.open(model) as bare_model_and_optimizer:
        yield bare_model_and_optimizer


def contents_of(model: Module, optimizer: Optimizer | None, extra: Mapping[str, Any]) -> Contents:
    """Collects what this rank saves of a model or an engine, its optimizer, and the ``extra`` values.

    Raises CheckpointError if a tensor has no memory or the optimizer is not the model's, TypeError if JSON cannot hold
    a value of ``extra``, or if lists and dicts are nested more than 100 deep.
    """
    with opened(model, optimizer) as (bare_model, bare_optimizer), torch.no_grad():  # to_local() is slow with autograd
        unwrapped = None if bare_optimizer is None else UnwrappedOptimizer.of(bare_optimizer)
        items, buffers = items_of(bare_model, unwrapped), buffers_of(bare_model)
        tensors = _chunks_by_name(items, buffers)
        header: dict[str, Any] = {"extra": {k: v for k, v in extra.items() if not isinstance(v, Tensor)}}
        if aliases := aliases_in(bare_model, items):
            header["aliases"] = aliases
        if unwrapped is not None:
            header["optimizer"] = unwrapped.internals.name
            names = names_by_group(items, len(unwrapped.all_groups))
            header["param_groups"] = list(map(describe_group, unwrapped.all_groups, names))
            for group in header["param_groups"]:
                group["options"].update(unwrapped.internals.format)
        for key, value in extra.items():
            if isinstance(value, Tensor):
                check_storage(f"extra {key!r}", "tensor", value := readable(value), CheckpointError)
                tensors[f"extra.{key}"] = Chunks.whole(value)
        # As JSON: refuses other values now, and changes of ``extra`` during an asynchronous save do not reach it.
        return Contents(from_json(to_json(header)), tensors, {model_key(item.name) for item in buffers})


def items_of(model: Module, unwrapped: UnwrappedOptimizer | None) -> list[Item]:
    """Lists all parameters of a model, in the same order on all ranks, each with its shard and its optimizer state.

    Waits for steps that worker threads have not finished.

    Raises:
        CheckpointError: the optimizer has parameters that the model does not have; a parameter is gathered in full
            at the moment, for a forward or backward pass, or has no memory; or a checkpoint cannot hold a state entry.
    """
    read_model(model)
    wait_for_steps(model.parameters())
    if unwrapped is None:
        return list(_parameters(model, ()))
    unwrapped.optimizer.synchronize()
    group_of = {param: index for index, group in enumerate(unwrapped.all_groups) for param in group["params"]}
    in_model = {id(param) for param in model.parameters()}  # DeepSpeed's master weights are not
    masters = [p for p in group_of if id(p) not in in_model and isinstance(assigned(p), FlatBuffer)]
    items = list(_parameters(model, masters))
    unknown = set(group_of) - {item.param for item in items}
    if unknown:
        shapes = sorted(tuple(param.shape) for param in unknown)
        raise CheckpointError(
            f"got an optimizer with {len(unknown)} parameters that the model has not, of shapes {shapes[:5]}, "
            "expected the optimizer of this model; make it after fully_shard, parallelize_module and the like, which "
            "replace parameters"
        )
    other_keys = [key for key in unwrapped.optimizer.state if not isinstance(key, Tensor)]
    if other_keys:
        raise CheckpointError(
            f"got an optimizer with state of {other_keys[0]!r:.80}, which is no parameter, expected state of "
            "parameters; save optimizer.state_dict() with torch.save"
        )
    slices: dict[Tensor, list[Any]] = {}  # spec and state of each slice of an optimizer tensor
    for param, group in group_of.items():
        try:
            spec, entries = unwrapped.internals.current_state(param, unwrapped.all_groups[group])
        except ValueError as error:
            raise CheckpointError(f"a parameter of shape {tuple(param.shape)}: {one_line(error)}") from None
        slices[param] = list(zip(spec.slices, spec.split(entries), strict=True))
    for item in items:
        if item.param in slices:
            item.group = group_of[item.param]
            item.spec, item.state = slices[item.param][item.segment or 0]
    return items


def _parameters(model: Module, masters: Sequence[Tensor]) -> Iterator[Item]:
    """Yields an item per parameter, without optimizer state.

    ``masters``: DeepSpeed's flat buffers of master weights, saved in place of the model's parameters of their names.
    """
    params = parameter_names(model)
    for master in masters:
        buffer = shard_of(master)
        assert isinstance(buffer, FlatBuffer)
        for segment in buffer.segments:
            params.pop(segment.name, None)
    params.update((f"master {index}", master) for index, master in enumerate(masters))
    for name, param in params.items():
        shard = shard_of(param)
        local = _local(name, "parameter", shard, param)
        if local.shape != shard.local_shape:
            raise CheckpointError(
                f"got {name} as a tensor of shape {tuple(local.shape)}, expected this rank's part, "
                f"{shard.local_shape}; save and load between steps, not between forward and backward"
            )
        if isinstance(shard, FlatBuffer):
            for index, segment in enumerate(shard.segments):
                part = local[segment.offset : segment.offset + segment.shard.numel]
                yield Item(segment.name, param, index, segment.shard, part)
        else:
            yield Item(name, param, None, shard, local)


def buffers_of(model: Module) -> list[Item]:
    """Lists the persistent buffers of a model, shared ones once, by their first name.

    Raises CheckpointError if one has no memory.
    """
    names: dict[Tensor, str] = {}
    for prefix, module in canonical_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names.setdefault(buffer, prefix + name)
    items = []
    for buffer, name in names.items():
        shard = shard_of(buffer)
        items.append(Item(name, buffer, None, shard, _local(name, "buffer", shard, buffer)))
    return items


def _local(name: str, what: str, shard: Shard, tensor: Tensor) -> Tensor:
    """A view of this rank's shard of a tensor; raises a CheckpointError that names the tensor if it has no memory."""
    try:
        local = shard.local(tensor).detach()
    except RuntimeError as error:
        raise CheckpointError(f"{name}: {error}") from None
    check_storage(name, what, local, CheckpointError)
    return local


def aliases_in(model: Module, items: Iterable[Item]) -> dict[str, str]:
    """Maps the other names of parameters with several names (tied weights) to the name under which each is saved."""
    names = all_parameter_names(model)
    aliases: dict[str, str] = {}
    for item in items:
        buffer = assigned(item.param)
        others: Sequence[str] = names.get(item.param, ())
        if isinstance(buffer, FlatBuffer) and item.segment is not None:
            others = buffer.segments[item.segment].aliases
        aliases.update((name, item.name) for name in others if name != item.name)
    return aliases


def names_by_group(items: Sequence[Item], count: int) -> list[list[str]]:
    """Lists the parameters' names by param group: one list for each of the optimizer's `count` groups."""
    names: list[list[str]] = [[] for _ in range(count)]
    for item in items:
        if item.group is not None:
            names[item.group].append(item.name)
    return names


def _chunks_by_name(items: Sequence[Item], buffers: Sequence[Item]) -> dict[str, Chunks]:
    """Maps each tensor's name in the checkpoint (weights, buffers, state entries) to this rank's part of it.

    A rank whose flat shard of a parameter is empty has no state. Such a rank lists the entries of fresh state, so that
    all ranks describe the same tensors; :meth:`Planning.plan` drops the entries that no rank holds.
    """
    tensors: dict[str, Chunks] = {}
    for item in (*items, *buffers):
        shard, spec, state = item.shard, item.spec, item.state
        for key, value in state.items():
            check_storage(item.name, f"state {key}", value, CheckpointError)
        if not shard.is_here:
            continue
        is_empty = isinstance(shard, FlatShard) and shard.placed_partition is not None and shard.numel == 0
        if spec is not None and is_empty and not state:
            state = spec.new_state(torch.device("cpu"))
        tensors |= tensors_of(item, item.local, spec, state, to_save=True)
    return tensors
