"""torch.amp.GradScaler for gradients that are held in the host's memory: it looks for gradients in ``.grad`` only."""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from shardopt.optim import ShardedOptimizer


def follow_loss_scalers() -> None:
    """Has all loss scalers unscale, and check, held gradients, too, from the first call on."""
    unscale = GradScaler._unscale_grads_
    if hasattr(unscale, "follows_held_gradients"):  # also of a function that wraps ours
        return

    @wraps(unscale)
    def unscale_all(
        scaler: GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        released = optimizer._internals.released if isinstance(optimizer, ShardedOptimizer) else None
        for device, flag in ({} if released is None else released.unscale(inv_scale, allow_fp16=allow_fp16)).items():
            found[device] = torch.maximum(found[device], flag) if device in found else flag
        return found

    unscale_all.follows_held_gradients = True  # type: ignore[attr-defined]
    GradScaler._unscale_grads_ = unscale_all  # type: ignore[assignment, method-assign]
