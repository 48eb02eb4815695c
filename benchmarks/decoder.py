"""The parameters of a decoder: all that optimizers, shards and checkpoints see of one. There is no forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """Sizes of the decoder. ``modern`` is Llama's kind: a gated MLP, no biases; otherwise it is GPT-2's."""

    layers: int
    hidden: int
    mlp: int
    key_value: int  # width of keys and values
    vocabulary: int
    modern: bool

    @classmethod
    def of_numel(cls, numel: int) -> Architecture:
        """GPT-2's kind with about that many parameters, about 12 layers, and a vocabulary of 1024."""
        hidden = max(1, round((numel / 144) ** 0.5 / 128)) * 128
        layers = max(1, round((numel - 1024 * hidden) / (12 * hidden**2)))
        return cls(layers, hidden, 4 * hidden, hidden, 1024, modern=False)


class Layer(nn.Module):
    def __init__(self, kind: Architecture) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return nn.RMSNorm(kind.hidden) if kind.modern else nn.LayerNorm(kind.hidden)

        def linear(width: int, out: int) -> nn.Linear:
            return nn.Linear(width, out, bias=not kind.modern)

        self.attention_norm = norm()
        self.query = linear(kind.hidden, kind.hidden)
        self.key = linear(kind.hidden, kind.key_value)
        self.value = linear(kind.hidden, kind.key_value)
        self.out = linear(kind.hidden, kind.hidden)
        self.mlp_norm = norm()
        if kind.modern:
            self.gate = linear(kind.hidden, kind.mlp)
        self.up = linear(kind.hidden, kind.mlp)
        self.down = linear(kind.mlp, kind.hidden)


class Decoder(nn.Module):
    def __init__(self, kind: Architecture) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kind.vocabulary, kind.hidden)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(kind.layers))
        self.norm = nn.RMSNorm(kind.hidden) if kind.modern else nn.LayerNorm(kind.hidden)
        if kind.modern:
            self.head = nn.Linear(kind.hidden, kind.vocabulary, bias=False)


def set_gradients(model: nn.Module) -> None:
    """Gives each parameter of which this rank holds anything a gradient, sharded like it."""
    for param in model.parameters():
        if param.numel():
            gradient: Tensor = param.detach() * 1e-2
            param.grad = gradient
