"""Patches torch.amp.GradScaler, which unscales and checks ``.grad`` only, to include gradients held on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from shardopt.optim import ShardedOptimizer


def follow_loss_scalers() -> None:
    """Patches GradScaler and all its subclasses defined so far to unscale and check gradients held on the host, too."""
    classes: list[type[GradScaler]] = [GradScaler]
    for scaler in classes:
        classes += scaler.__subclasses__()
        unscale = vars(scaler).get("_unscale_grads_")
        if unscale is not None and not hasattr(unscale, "finds_held_gradients"):  # also of a function that wraps ours
            scaler._unscale_grads_ = _with_held(unscale)  # type: ignore[method-assign]


def _with_held(unscale: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(unscale)
    def unscale_all(scaler: Any, optimizer: Any, factor: Tensor, found_inf: Tensor, allow_fp16: bool = True) -> Any:
        held = optimizer._internals.held_release if isinstance(optimizer, ShardedOptimizer) else None
        if held is None or held.is_unscaling:  # a subclass's method has called that of its base class
            return unscale(scaler, optimizer, factor, found_inf, allow_fp16)
        held.take_rest()
        held.is_unscaling = True
        try:
            found = unscale(scaler, optimizer, factor, found_inf, allow_fp16)
        finally:
            held.is_unscaling = False
        held.unscale(factor, found, found_inf, allow_fp16=allow_fp16)
        return found

    unscale_all.finds_held_gradients = True  # type: ignore[attr-defined]
    return unscale_all
