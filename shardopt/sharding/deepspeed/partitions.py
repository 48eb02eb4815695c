"""Finds which parameters' ranges DeepSpeed's flat partitions contain: ZeRO 1, 2 and 3, and BF16_Optimizer.

Reads DeepSpeed's private attributes. An unknown optimizer wrapper is refused. Checkpoints name experts of MoE layers,
whose numbers begin at 0 on each rank, by their numbers in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardopt.layout import FlatBuffer, FlatShard, Segment, assign, keep_float32_state, keeps_float32_state
from shardopt.layout.names import name_children, parameter_names
from shardopt.sharding.rank_group import rank_group_of

#: Index in the model and name of each parameter, by ``id(param)``.
_Names = Mapping[int, tuple[int, str]]


def assign_partitions(engine: Any) -> None:
    """Assigns shards to the flat tensors that the optimizer of a configured DeepSpeedEngine steps.

    Raises RuntimeError if DeepSpeed's wrapper or its partitioning is unsupported, or the wrapper steps the param groups
    one by one although the optimizer needs sums over all of them.
    """
    wrapper = engine.optimizer
    name_experts(engine.module)
    names = {id(param): (i, name) for i, (name, param) in enumerate(parameter_names(engine.module).items())}
    kind = type(wrapper).__name__
    if kind == "DeepSpeedZeroOptimizer":  # ZeRO 1 and 2
        _demand_one_step(engine, "param groups", wrapper.single_partition_of_fp32_groups)
        for index, flat in enumerate(wrapper.single_partition_of_fp32_groups):
            params = wrapper.round_robin_bit16_groups[index]
            offsets = wrapper.round_robin_bit16_offsets[index]
            group = wrapper.real_dp_process_group[index]
            assign(flat, _buffer_of_one_range(params, offsets, int(wrapper.partition_size[index]), group, names))
    elif kind == "BF16_Optimizer":
        for index, flat in enumerate(wrapper.fp32_groups_flat_partition):
            params = wrapper.bf16_groups[index]
            group = wrapper.real_dp_process_group[index]
            assign(flat, _buffer_of_one_range(params, _offsets(p.numel() for p in params), flat.numel(), group, names))
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        _demand_one_step(engine, "sub-groups of sub_group_size elements or less", wrapper.fp32_partitioned_groups_flat)
        for index, flat in enumerate(wrapper.fp32_partitioned_groups_flat):
            group = wrapper.sub_group_process_groups[index]
            assign(flat, _buffer_of_ranges(wrapper.fp16_groups[index], group, names))
    elif kind == "FP16_UnfusedOptimizer":  # ZeRO 0: masters have the parameters' shapes
        for params, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            for param, master in zip(params, masters, strict=True):
                if keeps_float32_state(param):
                    keep_float32_state(master)
    elif wrapper is not engine.basic_optimizer:  # ZeRO 0 in float32 has no wrapper
        raise RuntimeError(
            f"got DeepSpeed's {kind}, expected ZeRO 0 to 3 without MiCS, SuperOffload or ZenFlow; switch these off in "
            "the config"
        )


def _demand_one_step(engine: Any, parts: str, flats: Sequence[Tensor]) -> None:
    """Raises if DeepSpeed steps ``flats`` one after another, but the optimizer needs sums over all parameters."""
    optimizer = engine.basic_optimizer
    if len(flats) > 1 and any(optimizer.rule(group).has_totals for group in optimizer.param_groups):
        raise RuntimeError(
            f"got {type(optimizer).__name__} with {len(flats)} {parts}, which ZeRO steps one after another, expected a "
            "single one, as the step needs sums over all parameters; give all parameters the same options in one param "
            "group and, with ZeRO 3, a larger sub_group_size, or use ZeRO 0"
        )


def _buffer_of_one_range(
    params: Sequence[Tensor], offsets: Sequence[int], size: int, group: Any, names: _Names
) -> FlatBuffer:
    """A partition that is one range of all parameters flattened in a row, cut into ``size`` elements per rank."""
    segments = []
    for param, first in zip(params, offsets, strict=True):
        shard = _shard(param, tuple(param.shape), first, size, group)
        number, name = names[id(param)]
        segments.append(Segment(name, number, shard, shard.buffer_offset))
    return FlatBuffer(size, segments)


def _buffer_of_ranges(params: Sequence[Any], group: Any, names: _Names) -> FlatBuffer:
    """The layout of a partition that concatenates this rank's range of each parameter (ZeRO 3)."""
    segments = []
    sizes = [int(param.partition_numel()) for param in params]
    for param, size, offset in zip(params, sizes, _offsets(sizes), strict=True):
        number, name = names[id(param)]
        segments.append(Segment(name, number, _shard(param, tuple(param.ds_shape), 0, size, group), offset))
    return FlatBuffer(sum(sizes), segments)


def _shard(param: Tensor, shape: tuple[int, ...], first: int, size: int, group: Any) -> FlatShard:
    """This rank's range of a parameter of global shape ``shape``; see :class:`FlatShard`."""
    end, numel = size * dist.get_world_size(group), torch.Size(shape).numel()
    if first + numel > end:
        raise RuntimeError(
            f"got partitions that end at element {end - first} of a parameter, expected all {numel} elements; this "
            "version of DeepSpeed partitions in a way that shardopt does not know"
        )
    shard = FlatShard(shape, first, size, rank_group_of(group))
    return shard.with_float32_state() if keeps_float32_state(param) else shard


def _offsets(sizes: Iterable[int]) -> list[int]:
    """The offset of each tensor in the concatenation of tensors of these sizes."""
    return list(accumulate(sizes, initial=0))[:-1]


def name_experts(model: Any) -> None:
    """Names this rank's experts of MoE layers by their index in the whole model, as DeepSpeed's checkpoints do."""
    for layer in model.modules():
        if _is_moe_layer(layer):
            from deepspeed.utils import groups  # type: ignore[import-untyped]

            first = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
            experts = layer.deepspeed_moe.experts.deepspeed_experts
            name_children(experts, {name: str(first + int(name)) for name in experts._modules})


def unnamed_experts(model: Any) -> list[Tensor]:
    """Parameters that differ between ranks of a group and are in no known MoE layer, such as AutoEP's stacks."""
    layers = [layer for layer in model.modules() if _is_moe_layer(layer)]
    known = {id(param) for layer in layers for param in layer.deepspeed_moe.experts.parameters()}
    return [param for param in model.parameters() if not getattr(param, "allreduce", True) and id(param) not in known]


def _is_moe_layer(layer: Any) -> bool:
    """Whether a module is DeepSpeed's ``MoE``, whose experts are modules; AutoEP's layers have stacked weights."""
    return hasattr(getattr(getattr(layer, "deepspeed_moe", None), "experts", None), "deepspeed_experts")
