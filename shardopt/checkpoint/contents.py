"""The parts of a model and its optimizer that one rank contributes to a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.items import Chunks, Item, parameter_chunks, state_chunks
from shardopt.checkpoint.owner import Owner
from shardopt.kernels.memory import check_storage
from shardopt.layout import FlatBuffer, FlatShard, Shard, assigned, read_model, shard_of
from shardopt.layout.names import all_parameter_names, buffer_names, parameter_names
from shardopt.optim.internals import wait_for_steps

_CPU = torch.device("cpu")


def model_key(name: str) -> str:
    """A parameter's or buffer's name in a checkpoint."""
    return f"model.{name}"


def state_key(name: str, entry: str) -> str:
    """The name in a checkpoint of a state entry of the parameter ``name``."""
    return f"optimizer.{name}.{entry}"


def items_of(model: Module, owner: Owner | None) -> list[Item]:
    """All parameters of a model, in the same order on all ranks.

    Raises:
        CheckpointError: the optimizer has parameters that the model does not have; or a parameter is gathered in full
            at the moment, for a forward or backward pass, or has no memory.
    """
    read_model(model)
    wait_for_steps(model.parameters())
    if owner is not None:
        owner.optimizer.synchronize()
    group_of = {} if owner is None else owner.group_of
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
    others = [] if owner is None else [key for key in owner.optimizer.state if not isinstance(key, Tensor)]
    if others:
        raise CheckpointError(
            f"got an optimizer with state of {others[0]!r:.80}, which is no parameter, expected state of parameters; "
            "save optimizer.state_dict() with torch.save"
        )
    slices = {} if owner is None else {param: owner.slices(param, group) for param, group in group_of.items()}
    for item in items:
        if item.param in slices:
            item.group = group_of[item.param]
            item.spec, item.state = slices[item.param][item.segment or 0]
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
                yield Item(segment.name, param, index, segment.shard, segment.of(local))
        else:
            yield Item(name, param, None, shard, local)


def buffers_of(model: Module) -> list[Item]:
    """The buffers that belong to a model's state dict.

    Raises:
        CheckpointError: a buffer has no memory.
    """
    items = []
    for name, buffer in buffer_names(model).items():
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
        shard = assigned(item.param)
        others = shard.aliases.get(item.name, ()) if isinstance(shard, FlatBuffer) else names.get(item.param, ())
        aliases.update((name, item.name) for name in others if name != item.name)
    return aliases


def names_by_group(items: Sequence[Item], count: int) -> list[list[str]]:
    """The names of the parameters in each of `count` param groups."""
    names: list[list[str]] = [[] for _ in range(count)]
    for item in items:
        if item.group is not None:
            names[item.group].append(item.name)
    return names


def chunks_to_save(model: Module, owner: Owner | None, items: Sequence[Item]) -> dict[str, Chunks]:
    """The tensors of a model and its optimizer, by their names in a checkpoint.

    A rank that holds no element of a flat shard does not know whether the parameter has state: it assumes so.
    """
    of_model = [item for item in (*items, *buffers_of(model)) if item.shard.is_here]
    tensors = {model_key(item.name): parameter_chunks(item.shard, item.local) for item in of_model}
    if owner is None:
        return tensors
    for item in items:
        if item.spec is None or not item.spec.shard.is_here:
            continue
        shard, state = item.spec.shard, item.state
        is_assumed = not state and isinstance(shard, FlatShard) and shard.partition is not None and shard.numel == 0
        for entry, chunks in state_chunks(item.spec, item.spec.new(_CPU) if is_assumed else state).items():
            chunks.is_assumed = is_assumed
            tensors[state_key(item.name, entry)] = chunks
    return tensors
