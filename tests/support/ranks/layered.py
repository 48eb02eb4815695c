"""A model of layers, with an embedding that is the head as well."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Layers(nn.Module):
    """An embedding that is the head as well, and layers."""

    def __init__(self, recompute: bool = False, early: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute
        self.early = early  # reads a layer without calling it

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            if self.early and index == 2:
                x = x + layer[1].bias
            else:
                x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return self.head(x)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)


def batch(step: int) -> Tensor:
    return torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(step))
