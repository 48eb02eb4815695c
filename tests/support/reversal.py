"""A problem for the study of training quality that takes no time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from quality.task import Problem


class Reversal(Problem):
    """Learns to reverse 64 random numbers."""

    fingerprint = "reversal"

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Linear(64, 64)

    def loss(self, model: nn.Module, seed: int, step: int) -> Tensor:
        x = torch.randn(16, 64, generator=Generator().manual_seed(1000 * seed + step))
        return (model(x) - x.flip(1)).square().mean()

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        return float(self.loss(model, 0, 0))


def load(settings: Mapping[str, Any], cache: Path) -> Reversal:
    return Reversal()
