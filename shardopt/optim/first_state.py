"""State without a step: frameworks take a step of zero gradients and lr=0 to have an optimizer make its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.layout import RankGroup, UnknownShardError, on_any_rank, shard_of


def only_makes_state(
    groups: Sequence[Mapping[str, Any]], has_begun: Callable[[], bool], peers: RankGroup | None = None
) -> bool:
    """Whether a step is taken to make state: the first, while every lr is 0 and every gradient is zero.

    torch.distributed.checkpoint.state_dict and torchtitan take such a step. All ranks that share parameters must call
    this, in the first step or after a load or reset, and get the same answer if they share parameters directly or by
    way of one other rank: in a warm-up from lr=0 the gradients of one rank may be zero while another's are not.
    ``has_begun`` says whether a parameter was stepped before, or has a gradient beside its ``grad``; the optimizers of
    ``peers`` have the model's other parameters.
    """
    if not all(_is_zero_rate(group.get("lr", 0.0)) for group in groups):
        return False
    params = [param for group in groups for param in group["params"]]
    if any(param.is_cuda for param in params) and torch.cuda.is_current_stream_capturing():
        return False
    try:
        holders = [*(shard_of(param).holders for param in params), peers]
    except UnknownShardError:
        return False  # on all ranks; the step will raise it
    rank_groups = list(dict.fromkeys(ranks for ranks in holders if ranks is not None))
    is_step = has_begun() or any(map(_has_gradient, params))
    return not on_any_rank(rank_groups, is_step)


def _is_zero_rate(lr: Any) -> bool:
    """Whether a learning rate is zero; False for one on a device, which is not read."""
    return bool(lr == 0) if not isinstance(lr, Tensor) or (lr.device.type == "cpu" and lr.numel() == 1) else False


def _has_gradient(param: Tensor) -> bool:
    """Whether a parameter has a gradient with other values than zero on this rank, or one that cannot be read."""
    gradient = getattr(param.grad, "_local_tensor", param.grad)
    if gradient is None:
        return False
    return gradient.layout != torch.strided or gradient.is_meta or bool(gradient.any())
