"""A byte-level decoder-only transformer: RMSNorm, rotary positions, SwiGLU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.errors import UserError

VOCABULARY = 256

# name -> (dim, layers, heads)
SIZES = {
    "tiny": (128, 3, 4),
    "small": (256, 4, 4),
    "100m": (768, 14, 12),
}

_EPS = 1e-6  # of RMSNorm
_ROPE_BASE = 10000.0
_HIDDEN_MULTIPLE = 128

Turn = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """The dimensions that determine the parameters' names and shapes."""

    dim: int
    layers: int
    heads: int

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise UserError(
                f"a model of dim {self.dim} cannot have {self.heads} heads: dim must be a multiple of twice the heads"
            )

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer: 8/3 dim, rounded up."""
        return math.ceil(8 * self.dim / 3 / _HIDDEN_MULTIPLE) * _HIDDEN_MULTIPLE


def rope_table(positions: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, float32, each (positions, head_dim / 2)."""
    frequencies = _ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_dim/2]) by its position's angle (Su et al. 2021, eq. 34).

    Args:
        x: (batch, heads, positions, head_dim).
        cosines: (positions, head_dim / 2), float32.
        sines: (positions, head_dim / 2), float32.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(turned, dim=-1).to(x.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = _linear(config.dim, config.dim)
        self.key = _linear(config.dim, config.dim)
        self.value = _linear(config.dim, config.dim)
        self.out = _linear(config.dim, config.dim)

    def forward(self, x: Tensor, turn: Turn) -> Tensor:
        """x: (batch, positions, dim); turn applies the rotary positions."""
        batch, positions, dim = x.shape
        query, key, value = (
            projection(x).view(batch, positions, self.heads, -1).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(turn(query), turn(key), value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, dim))
        return out


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer 2020, eq. 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = _linear(config.dim, config.hidden)
        self.up = _linear(config.dim, config.hidden)
        self.down = _linear(config.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., dim)."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One pre-norm layer, whose ``weight * x / sqrt(mean(x^2) + eps)`` are Zhang & Sennrich 2019, eq. 4."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, _EPS)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, _EPS)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, turn: Turn) -> Tensor:
        """x: (batch, positions, dim); turn applies the rotary positions."""
        x = x + self.dropout(self.attention(self.attention_norm(x), turn))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    embedding: nn.Module
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Module
    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.make_layers(config)
        cosines, sines = rope_table(context, config.dim // config.heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def make_layers(self, config: ModelConfig) -> None:
        """Makes the modules that have parameters."""
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, _EPS)
        self.head = _linear(config.dim, VOCABULARY)
        self.init_weights(config)

    def init_weights(self, config: ModelConfig) -> None:
        """Draws the matrices; gains stay 1."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            std = 0.02 if name == "embedding.weight" else parameter.shape[1] ** -0.5 / 2
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                std /= math.sqrt(2 * config.layers)
            nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits.

        Args:
            tokens: int64, (batch, positions), positions at most the context.

        Returns:
            (batch, positions, 256), in the compute dtype.
        """
        positions = tokens.shape[1]
        turn = partial(rotate, cosines=self.cosines[:positions], sines=self.sines[:positions])
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, turn)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(config: ModelConfig, context: int, seed: int, dtype: torch.dtype, dropout: float = 0.0) -> Transformer:
    """The model on the CPU with the same weights on every rank; the rotary tables stay float32.

    Args:
        config: its dimensions.
        context: most positions.
        seed: of the weights.
        dtype: of the parameters.
        dropout: share of each layer's outputs that training drops.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Transformer(config, context)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    for block in network.blocks:
        block.dropout.p = dropout  # type: ignore[union-attr]
    return network
