"""A byte-level decoder-only transformer: RMSNorm, rotary positions, SwiGLU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.errors import UserError
from shardopt import unit

VOCABULARY = 256

# name -> (dim, layers, heads)
SIZES = {
    "tiny": (128, 3, 4),
    "small": (256, 4, 4),
    "medium": (512, 8, 8),
    "100m": (768, 14, 12),
    "350m": (1024, 28, 16),
}

_ROPE_BASE = 10000.0
_HIDDEN_MULTIPLE = 128


@dataclass(frozen=True)
class ModelConfig:
    """The dimensions that determine the parameters' names and shapes."""

    dim: int
    layers: int
    heads: int
    tied: bool = False
    parametrization: str = "sp"

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise UserError(
                f"a model of dim {self.dim} cannot have {self.heads} heads: dim must be a multiple of twice the heads"
            )

    @classmethod
    def of(
        cls,
        size: str,
        dim: int | None,
        layers: int | None,
        heads: int | None,
        tied: bool,
        parametrization: str = "sp",
    ) -> ModelConfig:
        """The named size, with every argument that is not None in place of the size's own value."""
        named = SIZES[size]
        return cls(dim or named[0], layers or named[1], heads or named[2], tied, parametrization)

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer: 8/3 dim, rounded up."""
        return math.ceil(8 * self.dim / 3 / _HIDDEN_MULTIPLE) * _HIDDEN_MULTIPLE


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` in float32 (Zhang & Sennrich 2019, eq. 4)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., dim)."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight.to(x.dtype)


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


class Linear(nn.Linear):
    """A linear layer without bias, which multiplies in FP8 where ``fp8`` is set."""

    fp8 = False

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., inputs)."""
        return unit.product(input, self.weight, fp8=True) if self.fp8 else super().forward(input)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = Linear(config.dim, config.dim)
        self.key = Linear(config.dim, config.dim)
        self.value = Linear(config.dim, config.dim)
        self.out = Linear(config.dim, config.dim)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """x: (batch, positions, dim)."""
        batch, positions, dim = x.shape
        query, key, value = (
            projection(x).view(batch, positions, self.heads, -1).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, dim))
        return out


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer 2020, eq. 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.hidden)
        self.up = Linear(config.dim, config.hidden)
        self.down = Linear(config.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., dim)."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """x: (batch, positions, dim)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cosines, sines))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out.

    With ``tied`` the embedding is also the output matrix.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.head = None if config.tied else nn.Linear(config.dim, VOCABULARY, bias=False)
        cosines, sines = rope_table(context, config.dim // config.heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        self._init_weights(config)

    def _init_weights(self, config: ModelConfig) -> None:
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
        cosines, sines = self.cosines[:positions], self.sines[:positions]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosines, sines)
        x = self.norm(x)
        matrix = self.embedding if self.head is None else self.head
        return F.linear(x, matrix.weight)
