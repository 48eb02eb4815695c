"""The training job's transformer in u-muP (arXiv 2407.17465): unit-scaled, with norms that have no gain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lm.model import VOCABULARY, ModelConfig, Transformer, Turn
from shardopt import unit
from shardopt.unit import multipliers


class UnitBlock(nn.Module):
    """One pre-norm, unit-scaled layer, whose two residual branches have weights of their own."""

    def __init__(self, config: ModelConfig, attention_weight: float, mlp_weight: float) -> None:
        super().__init__()
        self.weights = attention_weight, mlp_weight
        self.attention_norm = unit.RMSNorm(config.dim)
        self.attention = unit.Attention(config.dim, config.heads)
        self.mlp_norm = unit.RMSNorm(config.dim)
        self.mlp = unit.SwiGLU(config.dim, config.hidden)

    def forward(self, x: Tensor, turn: Turn) -> Tensor:
        """x: (batch, positions, dim); turn applies the rotary positions."""
        for_attention, for_mlp = self.weights
        branch, skip = unit.residual_split(x, for_attention)
        x = unit.residual_add(self.attention(self.attention_norm(branch), turn), skip, for_attention)
        branch, skip = unit.residual_split(x, for_mlp)
        return unit.residual_add(self.mlp(self.mlp_norm(branch)), skip, for_mlp)


class UnitTransformer(Transformer):
    """Logits for the mean cross entropy over the tokens, whose gradient is turned into that of the sum, scaled."""

    embedding: Any
    blocks: Any
    head: Any

    def make_layers(self, config: ModelConfig) -> None:
        weights = unit.residual_weights(2 * config.layers)
        self.embedding = unit.Embedding(VOCABULARY, config.dim)
        self.blocks = unit.Stack(UnitBlock(config, *weights[2 * i : 2 * i + 2]) for i in range(config.layers))
        self.norm = unit.RMSNorm(config.dim)
        self.head = unit.Readout(config.dim, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, (batch, positions, 256), in float32 at least, of tokens, int64 (batch, positions)."""
        logits = super().forward(tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return unit.scale_bwd(logits, tokens.numel() * multipliers.cross_entropy(VOCABULARY))


def build(config: ModelConfig, context: int, dtype: torch.dtype, fp8: bool = False) -> UnitTransformer:
    """The model with weights of seed 0; `fp8` is whether the linear layers of the blocks multiply in FP8."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = UnitTransformer(config, context)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in network.blocks.modules():
        if isinstance(module, unit.Linear):
            module.fp8 = fp8
    return network
