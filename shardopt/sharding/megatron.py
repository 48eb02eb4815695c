"""Megatron-Core's DistributedOptimizer: each data-parallel rank steps one range of every bucket of parameters.

Reads attributes of ``megatron.core.optimizer.distrib_optimizer.DistributedOptimizer`` and of its buffers, and compares
the shards made of the buffers with Megatron's own account of this rank's ranges. Megatron itself is not imported.

A rank's optimizer has no tensor for a parameter of which the rank steps nothing. Ranks that share blocks must list the
same parameters in the same order, so such a parameter gets an empty tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.layout import Engines, FlatShard, UnknownShardError, assign, keeps_float32_state, register_engines
from shardopt.sharding.exchange import RanksExchange, own_device
from shardopt.sharding.in_model import replaced_parameters

#: By model chunk, and by the models in its wrappers: Megatron's optimizer, and the DistributedOptimizers in it.
_optimizers: weakref.WeakKeyDictionary[Module, tuple[weakref.ref[Any], ...]] = weakref.WeakKeyDictionary()


def shards_of(wrapper: Any) -> dict[Tensor, FlatShard]:
    """This rank's range of each parameter that a DistributedOptimizer steps on any rank, in the order of the model.

    Blocks follow a parameter's shape on this rank: under tensor parallelism, that of its tensor-parallel part.

    Raises:
        UnknownShardError: Megatron's account of this rank's ranges differs from the buckets'.
    """
    group = wrapper.data_parallel_group
    on_gpu = dist.get_backend(group) != "gloo" and torch.cuda.is_available()
    exchange = RanksExchange((group,), own_device("cuda" if on_gpu else "cpu", group))
    shards = {}
    for buffer, of_buckets in zip(wrapper.buffers, wrapper.gbuf_ranges, strict=True):
        (ranges,) = of_buckets.values()
        for param, (begin, _, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            size = bucket.grad_data.numel() // dist.get_world_size(group)
            shard = FlatShard.equal(tuple(param.shape), begin - bucket.offset, size, exchange)
            known = ranges[number]["param_map"].get(param)
            theirs = (known["param"].start, known["param"].end) if known else (0, 0)
            ours = (shard.start, shard.end) if shard.numel else (0, 0)
            if theirs != ours:
                raise UnknownShardError(
                    f"got elements {theirs} of a parameter of shape {tuple(param.shape)} on this rank, expected {ours} "
                    "by the parameter's bucket; this version of Megatron-Core shards in a way that shardopt does not "
                    "know"
                )
            shards[param] = shard
    ordered = dict.fromkeys(param for chunk in wrapper.model_chunks for param in chunk.parameters())
    return {param: shards[param] for param in ordered if param in shards}


def held_by_group(wrapper: Any) -> list[dict[Tensor, Tensor]]:
    """Per param group, the float32 tensors that this rank steps, by the model's parameters.

    The tensors become leaves of autograd, as torch.optim demands: views of float32 parameters are none in Megatron.
    """
    groups = []
    for models, views, halves, masters in zip(
        wrapper.model_fp32_groups,
        wrapper.shard_fp32_groups,
        wrapper.model_float16_groups,
        wrapper.shard_fp32_from_float16_groups,
        strict=True,
    ):
        for position, view in enumerate(views):
            views[position] = view.detach()
            views[position].__dict__.update(view.__dict__)  # Megatron's marks, which its norm of gradients reads
        groups.append({**dict(zip(models, views, strict=True)), **dict(zip(halves, masters, strict=True))})
    return groups


def stepped_by_group(
    shards: Mapping[Tensor, FlatShard], held: Sequence[Mapping[Tensor, Tensor]], group: dist.ProcessGroup
) -> list[dict[Tensor, Tensor]]:
    """Per param group, the tensors that an optimizer on this rank has, by the model's parameters; assigns their shards.

    All ranks of ``group`` must call this, and get the same parameters in the same order.

    Args:
        shards: this rank's ranges, of the same parameters in the same order on all ranks.
        held: per param group, the tensors with elements on this rank, by the model's parameters.
        group: the ranks that hold the ranges.
    """
    numbers = {param: number for number, param in enumerate(shards)}
    known = {numbers[param]: index for index, params in enumerate(held) for param in params}
    of_ranks: list[dict[int, int]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_ranks, known, group=group)
    index_of = {number: index for of_rank in of_ranks for number, index in of_rank.items()}
    stepped: list[dict[Tensor, Tensor]] = [{} for _ in held]
    for param, shard in shards.items():
        if numbers[param] not in index_of:  # the parameter of another optimizer of the same buffers
            continue
        index = index_of[numbers[param]]
        tensor = held[index].get(param)
        if tensor is None:
            tensor = torch.empty(0, dtype=torch.float32, device=param.device)
        assign(tensor, shard.with_float32_state() if keeps_float32_state(param) else shard)
        stepped[index][param] = tensor
    return stepped


def adopt(chunks: Sequence[Module], optimizers: Sequence[Any]) -> None:
    """Lets checkpoints find the optimizers of a model by its chunks, or by the models in Megatron's wrappers.

    Args:
        chunks: Megatron's model chunks.
        optimizers: Megatron's optimizer, and the DistributedOptimizers in it.
    """
    for chunk in chunks:
        for model in _unwrapped(chunk):
            _optimizers[model] = tuple(weakref.ref(optimizer) for optimizer in dict.fromkeys(optimizers))


def _unwrapped(model: Module) -> Iterator[Module]:
    """A model, and the models in its wrappers: DistributedDataParallel, Float16Module."""
    yield model
    while isinstance(inner := getattr(model, "module", None), Module):
        model = inner
        yield model


def _alive(model: Module) -> list[Any]:
    return [optimizer for reference in _optimizers.get(model, ()) if (optimizer := reference()) is not None]


def _wrappers(model: Module) -> list[Any]:
    """The DistributedOptimizers of a model."""
    return [optimizer for optimizer in _alive(model) if hasattr(optimizer, "stepped")]


def _has_optimizer(model: Module, optimizer: Optimizer) -> bool:
    known = (*_alive(model), *(wrapper.optimizer for wrapper in _wrappers(model)))
    return any(optimizer is one for one in known)


@contextmanager
def _opened(model: Module) -> Iterator[tuple[Module, Optimizer]]:
    """The bare model with the tensors that the optimizer steps in place of the parameters, and the optimizer."""
    wrapper = _only_wrapper(model)
    *_, bare = _unwrapped(model)
    tensors = {param: tensor for group in wrapper.stepped for param, tensor in group.items()}
    with replaced_parameters(bare, tensors):
        yield bare, wrapper.optimizer


def _only_wrapper(model: Module) -> Any:
    wrappers = _wrappers(model)
    if len(wrappers) != 1 or len(wrappers[0].model_chunks) != 1:
        chunks = [len(wrapper.model_chunks) for wrapper in wrappers]
        raise ValueError(
            f"got a Megatron model with {len(wrappers)} DistributedOptimizers of {chunks} model chunks, expected one "
            "of one chunk; save with Megatron's own checkpoints, which hold the moments as float32"
        )
    data_parallel = dist.get_world_size(wrappers[0].data_parallel_group)
    if data_parallel != dist.get_world_size():
        raise ValueError(
            f"got a Megatron model on {dist.get_world_size()} ranks with data parallelism of {data_parallel}, expected "
            "data parallelism only, as ranks hold different parameters under one name otherwise; save with Megatron's "
            "own checkpoints, which hold the moments as float32"
        )
    return wrappers[0]


def _refresh(model: Module) -> None:
    """Makes the model's parameters from the tensors that the optimizer steps, after these were loaded."""
    wrapper = _only_wrapper(model)
    wrapper._copy_main_params_to_model_params()
    wrapper.model_chunks[0].start_param_sync(force_sync=True)


def _engines(model: Module) -> Engines | None:
    return Engines("Megatron", _has_optimizer, _opened, _refresh) if _wrappers(model) else None


register_engines(_engines)
