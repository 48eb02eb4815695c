"""Detects dummy steps: first steps with zero gradients and lr=0, which frameworks take to make an optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.layout import RankGroup, UnknownShardError, all_reduce_any, meet, shard_of


def agree_on_dummy_step(
    groups: Sequence[Mapping[str, Any]], has_begun: Callable[[], bool], peers: RankGroup | None = None
) -> bool:
    """Collective: whether the present step is a dummy step, which torch.distributed.checkpoint and torchtitan take.

    All ranks that share parameters must call this in a first step, also after a load or reset, and all-reduce the
    answer, as in a warm-up from lr=0 one rank's part of the gradients may be zero in an ordinary step. ``has_begun``
    tells whether a parameter was stepped before, or has a gradient held outside of ``param.grad``; ``peers`` are the
    ranks whose optimizers have the model's other parameters.
    """
    if not all(_is_zero_rate(group.get("lr", 0.0)) for group in groups):
        return False
    params = [param for group in groups for param in group["params"]]
    if any(param.is_cuda for param in params) and torch.cuda.is_current_stream_capturing():
        return False  # gradients cannot be read now
    try:
        holders = [*(shard_of(param).holders for param in params), peers]
    except UnknownShardError:
        return False  # on all ranks; the step will raise it
    rank_groups = list(dict.fromkeys(ranks for ranks in holders if ranks is not None))
    meet(rank_groups, "step")
    is_step = has_begun() or any(map(_has_nonzero_gradient, params))
    return not all_reduce_any(rank_groups, is_step)


def _is_zero_rate(lr: Any) -> bool:
    """Whether a learning rate is zero; False for a tensor on a device, as reading it would wait for the device."""
    if isinstance(lr, Tensor) and (lr.device.type != "cpu" or lr.numel() != 1):
        return False
    return bool(lr == 0)


def _has_nonzero_gradient(param: Tensor) -> bool:
    """Whether a parameter's gradient on this rank is nonzero anywhere; True for sparse and meta gradients, unread."""
    gradient = getattr(param.grad, "_local_tensor", param.grad)
    return gradient is not None and (gradient.layout != torch.strided or gradient.is_meta or bool(gradient.any()))
