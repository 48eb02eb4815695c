"""torch.amp.GradScaler for gradients that are held in the host's memory: it looks for gradients in ``.grad`` only."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from shardopt.optim import ShardedOptimizer

_Found = dict[torch.device, Tensor]

_UNSCALE = "_unscale_grads_"

_unscaling: set[Optimizer] = set()  # a class's method may call that of its base class


def follow_loss_scalers() -> None:
    """Has all classes of loss scalers unscale, and check, held gradients, too: those that are defined by now."""
    classes: list[type[GradScaler]] = [GradScaler]
    for scaler in classes:
        classes += scaler.__subclasses__()
        unscale = vars(scaler).get(_UNSCALE)
        if unscale is not None and not hasattr(unscale, "follows_held_gradients"):  # also of a function that wraps ours
            setattr(scaler, _UNSCALE, _following(unscale))


def _following(unscale: Callable[..., _Found]) -> Callable[..., _Found]:
    @wraps(unscale)
    def unscale_all(
        scaler: GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> _Found:
        held = optimizer._internals.held_release if isinstance(optimizer, ShardedOptimizer) else None
        if held is None or optimizer in _unscaling:
            return unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        held.take_rest()
        _unscaling.add(optimizer)
        try:
            found = unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        finally:
            _unscaling.remove(optimizer)
        held.unscale(inv_scale, found, found_inf.shape, allow_fp16=allow_fp16)
        return found

    unscale_all.follows_held_gradients = True  # type: ignore[attr-defined]
    return unscale_all
