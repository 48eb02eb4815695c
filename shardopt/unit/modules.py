"""Unit-scaled modules: weights of std 1, no bias and no gain unless asked for.

For ``shardopt.param_groups(rule="u-mup")``, a module's ``mup_types`` names the kinds of its parameters, and a stack's
``mup_depth`` is its number of residual blocks: attributes of modules, because sharding replaces parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from shardopt.unit import functional as U
from shardopt.unit import multipliers
from shardopt.unit.scaled import scale_bwd


class _Split(nn.Module):
    """A module with parameters, whose gradients are sums or means over parts of a batch; see :func:`set_split`."""

    share = 1.0


class Linear(_Split, nn.Linear):
    """:func:`shardopt.unit.linear` with a weight of std 1.

    Args:
        in_features: elements of an input.
        out_features: elements of an output.
        bias: whether there is a bias, of zeros.
        constrained: see :func:`shardopt.unit.linear`.
        fp8: whether to multiply in FP8.
    """

    mup_types: ClassVar[Mapping[str, str]] = {"weight": "weight", "bias": "bias"}

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, *, constrained: bool = True, fp8: bool = False
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.constrained = constrained
        self.fp8 = fp8

    def reset_parameters(self) -> None:
        """Normal weights of std 1, bias 0."""
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., in_features)."""
        return U.linear(input, self.weight, self.bias, constrained=self.constrained, fp8=self.fp8, share=self.share)


class Readout(Linear):
    """The layer that makes the logits: :func:`shardopt.unit.readout`, never in FP8."""

    mup_types: ClassVar[Mapping[str, str]] = {"weight": "output", "bias": "bias"}

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias, constrained=False)

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., in_features)."""
        return U.readout(input, self.weight, self.bias, share=self.share)


class Embedding(_Split, nn.Embedding):
    """:func:`shardopt.unit.embedding` with entries of std 1."""

    mup_types: ClassVar[Mapping[str, str]] = {"weight": "weight"}

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)

    def forward(self, input: Tensor) -> Tensor:
        """input: tokens, int64 of any shape."""
        return U.embedding(input, self.weight, share=self.share)


class RMSNorm(_Split):
    """:func:`shardopt.unit.rms_norm` over the last dimension; with ``affine`` it has a gain, of ones."""

    mup_types: ClassVar[Mapping[str, str]] = {"weight": "norm"}

    def __init__(self, dim: int, eps: float = 1e-5, affine: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=None)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., dim)."""
        return U.rms_norm(x, self.weight, self.eps, share=self.share)


class Attention(nn.Module):
    """Self-attention: ``query``, ``key``, ``value`` and ``out`` are :class:`Linear`.

    Args:
        dim: elements of an input.
        heads: heads, which share them evenly.
        causal: whether a position attends to no later position.
        mult: of the logits (alpha_attn-softmax).
        fp8: whether linear layers multiply in FP8.

    Raises:
        ValueError: dim is no multiple of heads.
    """

    def __init__(self, dim: int, heads: int, *, causal: bool = True, mult: float = 1.0, fp8: bool = False) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"got dim {dim} and {heads} heads, expected a multiple of the heads; change one of them")
        self.heads = heads
        self.causal = causal
        self.mult = mult
        self.query, self.key, self.value, self.out = (Linear(dim, dim, fp8=fp8) for _ in range(4))

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """x: (batch, positions, dim); rotate turns queries and keys, (batch, heads, positions, dim / heads)."""
        batch, positions, dim = x.shape
        factor = multipliers.query(dim // self.heads, self.mult)
        matched = scale_bwd(x, 1 / factor)
        projected = (scale_bwd(self.query(matched), factor), scale_bwd(self.key(matched), factor), self.value(x))
        query, key, value = (y.view(batch, positions, self.heads, -1).transpose(1, 2) for y in projected)
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        mixed = U.attention(query, key, value, causal=self.causal, mult=self.mult)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, dim))
        return out


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) up(x))``: ``gate``, ``up`` and ``down`` are :class:`Linear`.

    The layers are not constrained: ``down`` has backward the forward factor of ``up`` and ``gate``, and the other way
    round, so that the module's factors forward and backward are equal.
    """

    def __init__(self, dim: int, hidden: int, *, mult: float = 1.0, fp8: bool = False) -> None:
        super().__init__()
        self.mult = mult
        self.gate = Linear(dim, hidden, constrained=False, fp8=fp8)
        self.up = Linear(dim, hidden, constrained=False, fp8=fp8)
        self.down = Linear(hidden, dim, constrained=False, fp8=fp8)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., dim)."""
        out: Tensor = self.down(U.swiglu(self.up(x), self.gate(x), self.mult))
        return out


class Stack(nn.ModuleList):
    """A list of residual blocks; learning rates within are divided by the root of the number of blocks.

    Blocks are counted once, so that wrapping them or removing some for a pipeline does not change the number.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__(blocks)
        self.mup_depth = len(self)


def set_split(model: nn.Module, ranks: int, accumulation: int = 1) -> None:
    """Says how many parts each batch has, so that parameters' gradients have std 1 however the batch is split.

    Without this call gradients have std ``sqrt(accumulation / ranks)``, and Adam's moments are of another scale after a
    run resumes on another number of ranks.

    Args:
        model: with modules of this package, before or after sharding.
        ranks: number of ranks that average gradients.
        accumulation: backward passes of a step, whose gradients add up; their losses are not divided.
    """
    for module in model.modules():
        if isinstance(module, _Split):
            module.share = accumulation / ranks
