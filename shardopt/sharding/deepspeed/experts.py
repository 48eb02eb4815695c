"""Names of the experts of DeepSpeed's MoE layers by their numbers in the whole model, for checkpoints.

DeepSpeed's layers number the experts of each rank from 0 on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardopt.layout.names import name_children


def name_experts(model: Any) -> None:
    """Names the experts of MoE layers as in DeepSpeed's own checkpoints, by the order of the group's ranks."""
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
    return hasattr(getattr(getattr(layer, "deepspeed_moe", None), "experts", None), "deepspeed_experts")
