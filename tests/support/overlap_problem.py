"""Steps beside the forward pass: optimizers for a model of layers, and the usual loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import shardopt
from ranks.layered import batch

STEPS = 3


def start(model: nn.Module, overlap: bool | None, **options: Any) -> shardopt.AdamW8bit:
    """An optimizer with steps beside the forward pass (True), the backward pass (False) or none."""
    optimizer = shardopt.AdamW8bit(
        model.parameters(), lr=1e-2, min_quantized_numel=64, offload=None if overlap is None else "step", **options
    )
    if overlap is not None:
        shardopt.release_gradients(model, optimizer, overlap_forward=overlap, waiting_gradients=100)
    return optimizer


def train(
    model: nn.Module, optimizer: shardopt.AdamW8bit, steps: int = STEPS, between: Callable[[], object] = bool
) -> None:
    """The usual loop; ``between`` is called after each step."""
    schedule = ExponentialLR(optimizer, 0.7)
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        between()
