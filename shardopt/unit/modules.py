"""Unit-scaled modules: weights of std 1; biases and gains only on request.

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
    """Base class of modules with parameters: :func:`set_split` sets ``share``, accumulation steps / ranks."""

    share = 1.0


class Linear(_Split, nn.Linear):
    """:func:`shardopt.unit.linear` with a weight of std 1.

    Args:
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
        """Draws weights from a normal distribution of std 1, and sets the bias to 0."""
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Applies the layer to ``input``, (..., in_features)."""
        return U.linear(input, self.weight, self.bias, constrained=self.constrained, fp8=self.fp8, share=self.share)


class Readout(Linear):
    """The layer that makes the logits: :func:`shardopt.unit.readout`, never in FP8."""

    mup_types: ClassVar[Mapping[str, str]] = {"weight": "output", "bias": "bias"}

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias, constrained=False)

    def forward(self, input: Tensor) -> Tensor:
        """Computes logits from ``input``, (..., in_features)."""
        return U.readout(input, self.weight, self.bias, share=self.share)


class Embedding(_Split, nn.Embedding):
    """:func:`shardopt.unit.embedding` with entries of std 1."""

    mup_types: ClassVar[Mapping[str, str]] = {"weight": "weight"}

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)

    def forward(self, input: Tensor) -> Tensor:
        """Looks up the entries of ``input``: tokens, int64 of any shape."""
        return U.embedding(input, self.weight, share=self.share)


class RMSNorm(_Split):
    """:func:`shardopt.unit.rms_norm` over the last dimension; with ``affine`` it has a gain, of ones."""

    mup_types: ClassVar[Mapping[str, str]] = {"weight": "norm"}

    def __init__(self, dim: int, eps: float = 1e-5, affine: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=None)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes ``x``, (..., dim)."""
        return U.rms_norm(x, self.weight, self.eps, share=self.share)


class Attention(nn.Module):
    """Self-attention: ``query``, ``key``, ``value`` and ``out`` are :class:`Linear`.

    Args:
        heads: the number of heads, of ``dim / heads`` elements each.
        causal: whether a position attends to no later position.
        mult: the multiplier of the logits (alpha_attn-softmax).
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
        """Attends within ``x``, (batch, positions, dim).

        ``rotate`` is the rotary embedding: a function of queries, or keys, (batch, heads, positions, dim / heads).
        """
        factor = multipliers.query(x.shape[2] // self.heads, self.mult)
        shared = scale_bwd(x, 1 / factor)  # undoes ``factor`` in the gradient of x; the projections' weights keep it
        query, key, value = scale_bwd(self.query(shared), factor), scale_bwd(self.key(shared), factor), self.value(x)
        # From (batch, positions, dim) to (batch, heads, positions, dim / heads).
        query, key, value = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (query, key, value))
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        mixed = U.attention(query, key, value, causal=self.causal, mult=self.mult)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) up(x))``: ``gate``, ``up`` and ``down`` are :class:`Linear`.

    The layers have ``constrained=False``: the factor of ``down`` in the backward pass is that of ``up`` and ``gate`` in
    the forward pass, and vice versa, so that the module's factors forward and backward are equal.
    """

    def __init__(self, dim: int, hidden: int, *, mult: float = 1.0, fp8: bool = False) -> None:
        super().__init__()
        self.mult = mult
        self.gate = Linear(dim, hidden, constrained=False, fp8=fp8)
        self.up = Linear(dim, hidden, constrained=False, fp8=fp8)
        self.down = Linear(hidden, dim, constrained=False, fp8=fp8)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the module to ``x``, (..., dim)."""
        out: Tensor = self.down(U.swiglu(self.up(x), self.gate(x), self.mult))
        return out


class Stack(nn.ModuleList):
    """A list of residual blocks, whose number u-muP needs: learning rates inside are divided by its square root.

    The number is fixed here: wrapping blocks, or removing some for a pipeline stage, does not change learning rates.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__(blocks)
        self.mup_depth = len(self)


def set_split(model: nn.Module, ranks: int, accumulation: int = 1) -> None:
    """Tells modules into how many parts a batch is split, so that parameters' gradients have std 1 for any split.

    Without this call gradients have std ``sqrt(accumulation / ranks)``, and Adam's moments are of another scale after a
    run resumes on another number of ranks.

    Args:
        model: a model that contains modules of this package, before or after sharding.
        ranks: the number of data-parallel ranks, over which gradients are averaged.
        accumulation: the number of backward passes per step, whose gradients are summed and losses not divided.
    """
    for module in model.modules():
        if isinstance(module, _Split):
            module.share = accumulation / ranks
