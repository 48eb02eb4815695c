"""Patches torch.amp.GradScaler, which unscales and checks ``.grad`` only, to include gradients held on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from shardopt.optim import ShardedOptimizer


def patch_loss_scalers() -> None:
    """Patches GradScaler and all its subclasses defined so far to unscale and check gradients held on the host, too."""
    classes: list[type[GradScaler]] = [GradScaler]
    for scaler in classes:  # grows within the loop
        classes += scaler.__subclasses__()
        unscale = vars(scaler).get("_unscale_grads_")
        # functools.wraps copies the attribute, so a function that somebody else has put around ours has it, too.
        if unscale is not None and not hasattr(unscale, "unscales_host_gradients"):
            scaler._unscale_grads_ = _with_host_gradients(unscale)  # type: ignore[method-assign]


def _with_host_gradients(unscale: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``GradScaler._unscale_grads_``: after ``.grad`` it unscales and checks gradients held on the host."""

    @wraps(unscale)
    def unscale_all(scaler: Any, optimizer: Any, factor: Tensor, found_inf: Tensor, allow_fp16: bool = True) -> Any:
        release = optimizer._internals.held_release if isinstance(optimizer, ShardedOptimizer) else None
        if release is None or release.is_unscaling:  # holds no gradients, or a subclass's method calls its base's
            return unscale(scaler, optimizer, factor, found_inf, allow_fp16)
        release.collect_grads()
        release.is_unscaling = True
        try:
            found = unscale(scaler, optimizer, factor, found_inf, allow_fp16)
        finally:
            release.is_unscaling = False
        release.unscale(factor, found, found_inf, allow_fp16=allow_fp16)
        return found

    unscale_all.unscales_host_gradients = True  # type: ignore[attr-defined]
    return unscale_all
