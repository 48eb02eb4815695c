"""A byte-level decoder-only transformer (RMSNorm, rotary positions, SwiGLU), in two parametrizations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.errors import UserError
from lm.options import Config
from shardopt import unit
from shardopt.unit import multipliers

VOCABULARY = 256

# name -> (dim, layers, heads)
SIZES = {
    "tiny": (128, 3, 4),
    "small": (256, 4, 4),
    "medium": (512, 8, 8),
    "100m": (768, 14, 12),
    "350m": (1024, 28, 16),
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
    tied: bool = False
    parametrization: str = "sp"

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise UserError(
                f"a model of dim {self.dim} cannot have {self.heads} heads: dim must be a multiple of twice the heads"
            )

    @classmethod
    def of(cls, options: Config) -> ModelConfig:
        """The dimensions of a named size, of which each one may have an option of its own."""
        dim, layers, heads = SIZES[options.size]
        return cls(
            options.dim or dim, options.layers or layers, options.heads or heads, options.tied, options.parametrization
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
        self.gate = Linear(config.dim, config.hidden)
        self.up = Linear(config.dim, config.hidden)
        self.down = Linear(config.hidden, config.dim)

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
    """Bytes in, logits of the next byte out.

    With ``tied`` the embedding is also the output matrix.
    """

    embedding: nn.Embedding | unit.Embedding
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Module | None
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
        self.head = None if config.tied else nn.Linear(config.dim, VOCABULARY, bias=False)
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
        x = self.norm(x)
        logits: Tensor = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        return logits


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
    """The transformer in u-muP (arXiv 2407.17465): unit-scaled, with norms that have no gain.

    Attributes:
        accumulation: backward passes of a step, by which losses are divided.
    """

    accumulation = 1

    def make_layers(self, config: ModelConfig) -> None:
        """Makes the modules that have parameters."""
        weights = unit.residual_weights(2 * config.layers)
        self.embedding = unit.Embedding(VOCABULARY, config.dim)
        self.blocks = unit.Stack(UnitBlock(config, *weights[2 * i : 2 * i + 2]) for i in range(config.layers))
        self.norm = unit.RMSNorm(config.dim)
        self.head = unit.Readout(config.dim, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the mean cross entropy over the tokens, whose gradient is turned into that of the sum, scaled.

        Args:
            tokens: int64, (batch, positions), positions at most the context.

        Returns:
            (batch, positions, 256), in float32 at least.
        """
        logits = super().forward(tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return unit.scale_bwd(logits, tokens.numel() * self.accumulation * multipliers.cross_entropy(VOCABULARY))


# By the values of the option parametrization.
PARAMETRIZATIONS = {"sp": Transformer, "u-mup": UnitTransformer}


def build(
    config: ModelConfig,
    context: int,
    seed: int,
    dtype: torch.dtype,
    fp8: bool = False,
    ranks: int = 1,
    accumulation: int = 1,
    dropout: float = 0.0,
) -> Transformer:
    """The model on the CPU with the same weights on every rank; the rotary tables stay float32.

    Args:
        config: its dimensions and parametrization.
        context: most positions.
        seed: of the weights.
        dtype: of the parameters.
        fp8: whether the linear layers of the blocks multiply in FP8.
        ranks: ranks that average gradients.
        accumulation: backward passes of a step, by which losses are divided.
        dropout: share of each layer's outputs that training drops.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = PARAMETRIZATIONS[config.parametrization](config, context)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in network.blocks.modules():
        if isinstance(module, Linear | unit.Linear):
            module.fp8 = fp8
        if isinstance(module, nn.Dropout):
            module.p = dropout
    if isinstance(network, UnitTransformer):
        unit.set_split(network, ranks, accumulation)
        network.accumulation = accumulation
    return network
