"""A small transformer whose attention logits grow, and their maxima."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import shardopt

DIM, HEADS, KEY_HEADS = 64, 4, 2


class Attention(nn.Module):
    """Causal, two query heads to a key head."""

    def __init__(self) -> None:
        super().__init__()
        head = DIM // HEADS
        self.q_proj = nn.Linear(DIM, HEADS * head)
        self.k_proj = nn.Linear(DIM, KEY_HEADS * head)
        self.v_proj = nn.Linear(DIM, KEY_HEADS * head)

    def forward(self, x: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for p in projections)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


class Transformer(nn.Module):
    """Embeddings, two layers of attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, DIM)
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.head = nn.Linear(DIM, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


class MaxLogits(TorchFunctionMode):
    """Records each head's largest logit, by attention module, as docs/muon.md shows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.largest: dict[str, Tensor] = {}
        self._name = ""
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                module.register_forward_pre_hook(lambda *_, name=name: setattr(self, "_name", name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k = (x.detach() for x in args[:2])
            logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
            now = logits.tril().amax((0, 2, 3))
            self.largest[self._name] = torch.maximum(now, self.largest.get(self._name, now))
        return func(*args, **(kwargs or {}))


def tokens_of(step: int) -> Tensor:
    return torch.randint(32, (4, 12), generator=torch.Generator().manual_seed(step))


def max_logits(model: nn.Module, step: int = 0) -> dict[str, Tensor]:
    """The largest logits of one batch."""
    with torch.no_grad(), MaxLogits(model) as recorded:
        model(tokens_of(step))
    return recorded.largest


def trained(threshold: float | None, steps: int = 12) -> Transformer:
    """After some steps at a learning rate that lets logits grow, each clipped if there is a threshold."""
    model = Transformer()
    optimizer = shardopt.Muon8bit(shardopt.muon_groups(model, lr=0.2))
    for step in range(steps):
        with MaxLogits(model) as recorded:
            F.cross_entropy(model(tokens_of(step)).flatten(0, 1), tokens_of(step).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if threshold is not None:
            shardopt.qk_clip_(model, recorded.largest, threshold, optimizer=optimizer)
    return model
