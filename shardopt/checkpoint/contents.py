"""The contents of a checkpoint on one rank: its parts of the model and of the optimizer's state, and the header."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import describe
from shardopt.checkpoint.header import dumped, loaded
from shardopt.checkpoint.items import Chunks, Item, model_key, tensors_of
from shardopt.checkpoint.wording import line
from shardopt.kernels.memory import check_storage, readable
from shardopt.layout import FlatBuffer, FlatShard, Shard, assigned, engines_of, read_model, shard_of
from shardopt.layout.names import all_parameter_names, canonical_modules, parameter_names
from shardopt.optim import ShardedOptimizer
from shardopt.optim.internals import wait_for_steps
from shardopt.report.memory import owner_of
from shardopt.wrapper.optimizer import QuantizedState

_CPU = torch.device("cpu")


class Contents(NamedTuple):
    """The header and the tensors that one rank saves.

    Attributes:
        header: a dict that JSON can hold.
        tensors: the tensors of which this rank has a part or knows, by their names in the checkpoint.
        unequal: names of tensors that may differ between ranks, such as buffers; the first rank's are saved.
    """

    header: dict[str, Any]
    tensors: Mapping[str, Chunks]
    unequal: Collection[str] = ()


class Owner(NamedTuple):
    """The optimizer that a checkpoint saves and loads.

    Attributes:
        groups: all param groups, whether this rank has state of their parameters or not.
        optimizer: the optimizer that has this rank's state; with a ZeroRedundancyOptimizer, the optimizer inside.
    """

    groups: list[dict[str, Any]]
    optimizer: Any

    @classmethod
    def of(cls, optimizer: Optimizer) -> Owner:
        """The owner of an optimizer of shardopt, or of quantize_state, or of a wrapper of one; see :func:`owner_of`.

        Raises:
            TypeError: the optimizer is none of these.
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
        """Reads and writes state for checkpoints: ``optim.internals.Internals``, or the wrapper's ``Entries``."""
        return self.optimizer._internals


@contextmanager
def opened(model: Module, optimizer: Optimizer | None) -> Iterator[tuple[Module, Optimizer | None]]:
    """The given model and optimizer, or the bare model and the optimizer of an engine."""
    engines = engines_of(model)
    if engines is None:
        yield model, optimizer
        return
    if optimizer is not None and not engines.has_optimizer(model, optimizer):
        raise TypeError(
            f"got an optimizer beside a {engines.name} engine that is not the engine's, expected the engine only; "
            "leave the optimizer out"
        )
    with engines.opened(model) as (bare, own):
        yield bare, own


def contents_of(model: Module, optimizer: Optimizer | None, extra: Mapping[str, Any]) -> Contents:
    """The contents that this rank saves of a model or an engine, its optimizer, and other values.

    Raises:
        CheckpointError: a tensor has no memory, or the optimizer is not the model's.
        TypeError: JSON cannot hold a value of ``extra``, or lists and dicts are nested more than 100 deep.
    """
    with opened(model, optimizer) as (bare, own), torch.no_grad():  # without autograd to_local() is no work
        owner = None if own is None else Owner.of(own)
        items, buffers = items_of(bare, owner), buffers_of(bare)
        tensors = _chunks_of(items, buffers)
        header: dict[str, Any] = {"extra": {k: v for k, v in extra.items() if not isinstance(v, Tensor)}}
        if aliases := aliases_in(bare, items):
            header["aliases"] = aliases
        if owner is not None:
            header["optimizer"] = owner.internals.name
            names = names_by_group(items, len(owner.groups))
            header["param_groups"] = [describe(*pair) for pair in zip(owner.groups, names, strict=True)]
            for group in header["param_groups"]:
                group["options"].update(owner.internals.format)
        for key, value in extra.items():
            if isinstance(value, Tensor):
                check_storage(f"extra {key!r}", "tensor", value := readable(value), CheckpointError)
                tensors[f"extra.{key}"] = Chunks.whole(value)
        return Contents(loaded(dumped(header)), tensors, {model_key(item.name) for item in buffers})


def items_of(model: Module, owner: Owner | None) -> list[Item]:
    """All parameters of a model, in the same order on all ranks, with the present state of an optimizer.

    Raises:
        CheckpointError: the optimizer has parameters that the model does not have; a parameter is gathered in full
            at the moment, for a forward or backward pass, or has no memory; or a checkpoint cannot hold a state entry.
    """
    read_model(model)
    wait_for_steps(model.parameters())
    if owner is None:
        return list(_parameters(model, ()))
    owner.optimizer.synchronize()
    group_of = {param: index for index, group in enumerate(owner.groups) for param in group["params"]}
    own = {id(param) for param in model.parameters()}
    items = list(_parameters(model, [p for p in group_of if id(p) not in own and isinstance(assigned(p), FlatBuffer)]))
    strangers = set(group_of) - {item.param for item in items}
    if strangers:
        shapes = sorted(tuple(param.shape) for param in strangers)
        raise CheckpointError(
            f"got an optimizer with {len(strangers)} parameters that the model has not, of shapes {shapes[:5]}, "
            "expected the optimizer of this model; make it after fully_shard, parallelize_module and the like, which "
            "replace parameters"
        )
    others = [key for key in owner.optimizer.state if not isinstance(key, Tensor)]
    if others:
        raise CheckpointError(
            f"got an optimizer with state of {others[0]!r:.80}, which is no parameter, expected state of parameters; "
            "save optimizer.state_dict() with torch.save"
        )
    states: dict[Tensor, Any] = {}
    for param, group in group_of.items():
        try:
            form, held = owner.internals.held(param, owner.groups[group])
        except ValueError as error:
            raise CheckpointError(f"a parameter of shape {tuple(param.shape)}: {line(error)}") from error
        states[param] = form.slices, form.split(held)
    for item in items:
        if item.param in states:
            slices, of_slices = states[item.param]
            item.group, number = group_of[item.param], item.segment or 0
            item.spec, item.state = slices[number], of_slices[number]
    return items


def _parameters(model: Module, masters: Sequence[Tensor]) -> Iterator[Item]:
    """The parameters of a model. Flat buffers of masters take the place of the model's own parameters (DeepSpeed's)."""
    named = parameter_names(model)
    for param in masters:
        buffer = shard_of(param)
        assert isinstance(buffer, FlatBuffer)
        for segment in buffer.segments:
            named.pop(segment.name, None)
    named.update((f"master {index}", param) for index, param in enumerate(masters))
    for name, param in named.items():
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
    """The buffers that belong to a model's state dict, each once.

    Raises:
        CheckpointError: a buffer has no memory.
    """
    found: dict[Tensor, str] = {}
    for prefix, module in canonical_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.setdefault(buffer, prefix + name)
    items = []
    for buffer, name in found.items():
        shard = shard_of(buffer)
        items.append(Item(name, buffer, None, shard, _local(name, "buffer", shard, buffer)))
    return items


def _local(name: str, what: str, shard: Shard, tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, to be read or written."""
    try:
        local = shard.local(tensor).detach()
    except RuntimeError as error:
        raise CheckpointError(f"{name}: {error}") from error
    check_storage(name, what, local, CheckpointError)
    return local


def aliases_in(model: Module, items: Iterable[Item]) -> dict[str, str]:
    """The names of shared parameters under which they are not saved, each with the name under which they are."""
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
    """The names of the parameters in each of `count` param groups."""
    names: list[list[str]] = [[] for _ in range(count)]
    for item in items:
        if item.group is not None:
            names[item.group].append(item.name)
    return names


def _chunks_of(items: Sequence[Item], buffers: Sequence[Item]) -> dict[str, Chunks]:
    """The tensors of a model and its optimizer, by their names in a checkpoint.

    A rank that holds no element of a flat shard lists fresh state, so that all ranks list the same tensors;
    :meth:`Planning.plan` drops what no rank holds.
    """
    tensors: dict[str, Chunks] = {}
    for item in (*items, *buffers):
        shard, spec, state = item.shard, item.spec, item.state
        for key, value in state.items():
            check_storage(item.name, f"state {key}", value, CheckpointError)
        if not shard.is_here:
            continue
        is_empty = isinstance(shard, FlatShard) and shard.partition is not None and shard.numel == 0
        if spec is not None and is_empty and not state:
            state = spec.new(_CPU)
        tensors |= tensors_of(item, item.local, spec, state, to_save=True)
    return tensors
