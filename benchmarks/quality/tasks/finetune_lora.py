"""The fine-tuning of finetune.py by adapters of low rank (LoRA, arXiv 2106.09685) beside all linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quality.task import Task
from quality.tasks import finetune
from quality.text import TextProblem

SMALL = {**finetune.SMALL, "rank": 32, "alpha": 32}
LARGE = {**finetune.LARGE, "rank": 32, "alpha": 32}


class Adapted(nn.Module):
    """``W x + alpha / rank * B A x`` with W frozen, A normal and B zero at first."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: int) -> None:
        super().__init__()
        self.weight = linear.weight
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) * linear.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        self._scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self._scale * F.linear(F.linear(x, self.down), self.up)


def adapt(model: nn.Module, rank: int, alpha: int) -> None:
    """Freezes a model and puts adapters beside its linear layers; not the output matrix, which it reads by itself."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "head":
                setattr(module, name, Adapted(child, rank, alpha))


def load(settings: Mapping[str, Any], cache: Path) -> TextProblem:
    base = {name: value for name, value in settings.items() if name not in ("rank", "alpha")}
    return finetune.load(base, cache, lambda model: adapt(model, settings["rank"], settings["alpha"]))


def task(size: str) -> Task:
    # Rank 32: torchao quantizes no tensors below 4,096 elements, shardopt no rows below 32.
    if size == "large":
        return Task("finetune_lora", LARGE, steps=1000, lr=1e-3, load=load)
    return Task("finetune_lora", SMALL, steps=200, lr=8e-3, load=load)
