"""Unit-scaled operations: given inputs and output gradients of std 1, outputs and input gradients have std about 1.

:mod:`shardopt.unit.multipliers` computes the factors. With ``constrained=True`` the input's gradient is multiplied by
the output's factor, with False by a better one of its own: correct only if the input has no other path to the loss, or
if the factors' products forward and backward are equal over several layers, as in :class:`shardopt.unit.SwiGLU`.

``share`` (accumulation steps / ranks) is 1 if a step has one backward pass on one rank. Otherwise the gradient is a sum
over accumulation steps and a mean over ranks: with ``share`` the parameters' gradients have std 1 in the end, however a
batch is split. :func:`shardopt.unit.set_split` sets ``share`` in modules.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shardopt.unit import multipliers
from shardopt.unit.scaled import product, scale_bwd, scale_fwd


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    constrained: bool = True,
    fp8: bool = False,
    share: float = 1.0,
) -> Tensor:
    """``(x weight^T + bias) / sqrt(inputs)``, (..., outputs).

    Args:
        x: (..., inputs), floating; the result has its dtype, or autocast's.
        weight: (outputs, inputs), of std 1.
        bias: (outputs,).
        constrained: whether the gradient of x has the output's factor instead of ``1 / sqrt(outputs)``.
        fp8: whether to multiply in FP8; see :func:`shardopt.unit.product`.
        share: accumulation steps / ranks.
    """
    outputs, inputs = weight.shape
    factors = multipliers.linear(inputs, outputs, _tokens(x, share), constrained)
    return _affine(x, weight, bias, factors, fp8)


def readout(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, share: float = 1.0) -> Tensor:
    """``(x weight^T + bias) / inputs``: the logits. Arguments as for :func:`linear`."""
    outputs, inputs = weight.shape
    return _affine(x, weight, bias, multipliers.readout(inputs, outputs, _tokens(x, share)), False)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, factors: multipliers.Factors, fp8: bool) -> Tensor:
    """Computes ``x weight^T + bias``, scaled by ``factors``; the bias is added to the rounded product."""
    result = product(x, weight, *factors, fp8=fp8)
    if bias is None:
        return result
    return result + scale_fwd(scale_bwd(bias, factors.second), factors.output).to(result.dtype)


def _tokens(x: Tensor, share: float) -> float:
    """The number of terms in the gradient of a parameter of a layer with input x: rows of x, times ``share``."""
    return math.prod(x.shape[:-1]) * share


def matmul(left: Tensor, right: Tensor, *, constrained: bool = True) -> Tensor:
    """``left right / sqrt(inner)``; (..., rows, inner) by (..., inner, columns), both activations."""
    factors = multipliers.matmul(left.shape[-2], left.shape[-1], right.shape[-1], constrained)
    return scale_fwd(torch.matmul(scale_bwd(left, factors.first), scale_bwd(right, factors.second)), factors.output)


def gelu(x: Tensor, mult: float = 1.0, *, constrained: bool = True) -> Tensor:
    """``gelu(mult x) / mult``, scaled."""
    factors = multipliers.gelu(mult, constrained)
    return scale_fwd(F.gelu(scale_bwd(x, factors.first) * mult) / mult, factors.output)


def silu(x: Tensor, mult: float = 1.0, *, constrained: bool = True) -> Tensor:
    """``x sigmoid(mult x)``, scaled."""
    factors = multipliers.silu(mult, constrained)
    return scale_fwd(_silu(scale_bwd(x, factors.first), mult), factors.output)


def swiglu(x: Tensor, gate: Tensor, mult: float = 1.0) -> Tensor:
    """``x gate sigmoid(mult gate)``, scaled (Shazeer 2020, eq. 6); tensors of one shape."""
    factor = multipliers.swiglu(mult)
    return scale_fwd(scale_bwd(x, factor) * _silu(scale_bwd(gate, factor), mult), factor)


def _silu(x: Tensor, mult: float) -> Tensor:
    """``x sigmoid(mult x)``, not scaled."""
    return F.silu(x) if mult == 1.0 else x * torch.sigmoid(x * mult)


def softmax(x: Tensor, dim: int, mult: float = 1.0, *, constrained: bool = True) -> Tensor:
    """``softmax(mult x)`` along ``dim``, scaled: entries add up to between the root of the dim's size and the size."""
    factors = multipliers.softmax(x.shape[dim], mult, constrained)
    return scale_fwd(F.softmax(scale_bwd(x, factors.first) * mult, dim=dim), factors.output)


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, mult: float = 1.0, dropout: float = 0.0
) -> Tensor:
    """Attention with logits ``query key^T mult / head_dim``, scaled; tensors: (..., heads, positions, head_dim).

    If ``causal``, a position attends to no later position. ``mult`` is u-muP's alpha_attn-softmax, and ``dropout`` the
    fraction of attention weights that are dropped.
    """
    *_, positions, head_dim = value.shape
    factor = multipliers.attention(positions, head_dim, causal, mult, dropout)
    query, key, value = (scale_bwd(x, factor) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=causal, scale=mult / head_dim
    )
    return scale_fwd(mixed, factor)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, share: float = 1.0
) -> Tensor:
    """Layer norm over the last dimension, in float32 at least; x: (..., width)."""
    wide = _at_least_float32(x)
    weight, bias = _norm_parameter(weight, wide, share), _norm_parameter(bias, wide, share)
    return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5, *, share: float = 1.0) -> Tensor:
    """``weight x / sqrt(mean(x^2) + eps)`` over the last dimension, in float32 at least; x: (..., width)."""
    wide = _at_least_float32(x)
    weight = _norm_parameter(weight, wide, share)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal if weight is None else normal * weight).to(x.dtype)


def _at_least_float32(x: Tensor) -> Tensor:
    """Casts 16-bit tensors to float32, in which norms and losses are computed; returns float32 and float64 as is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _norm_parameter(param: Tensor | None, x: Tensor, share: float) -> Tensor | None:
    """A norm's gain or bias in the dtype of its input ``x``, with a scaled gradient."""
    return None if param is None else scale_bwd(param, multipliers.norm(_tokens(x, share))).to(x.dtype)


def embedding(tokens: Tensor, weight: Tensor, *, share: float = 1.0) -> Tensor:
    """Looks up rows of ``weight``, (entries, width), by the int64 indices ``tokens``: (..., width)."""
    return F.embedding(tokens, scale_bwd(weight, multipliers.embedding(weight.shape[0], tokens.numel() * share)))


def add(left: Tensor, right: Tensor, *, constrained: bool = True) -> Tensor:
    """``(left + right) / sqrt(2)``; shapes broadcast."""
    numel = math.prod(torch.broadcast_shapes(left.shape, right.shape))  # type: ignore[no-untyped-call]
    factors = multipliers.add(numel // max(left.numel(), 1), numel // max(right.numel(), 1), constrained)
    return scale_fwd(scale_bwd(left, factors.first) + scale_bwd(right, factors.second), factors.output)


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Dropout, scaled: elements that are kept are divided by ``sqrt(1 - p)``."""
    factor = multipliers.dropout(p) if training else 1.0
    return scale_fwd(F.dropout(scale_bwd(x, factor), p, training), factor)


def residual_split(x: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Returns x twice, as input of a residual branch and of its skip connection, each with its weight on the gradient.

    With :func:`residual_add`, computes ``(tau f(x) + x) / sqrt(1 + tau^2)``, with gradients of std 1 in the branch.
    """
    branch_weight, skip_weight = multipliers.branch_and_skip(tau)
    return scale_bwd(x, branch_weight), scale_bwd(x, skip_weight)


def residual_add(branch: Tensor, skip: Tensor, tau: float) -> Tensor:
    """The weighted sum of a residual branch and its skip connection; :func:`residual_split` weights their gradients."""
    branch_weight, skip_weight = multipliers.branch_and_skip(tau)
    return scale_fwd(branch, branch_weight) + scale_fwd(skip, skip_weight)


def cross_entropy(logits: Tensor, targets: Tensor, mult: float = 1.0, ignore_index: int = -100) -> Tensor:
    """The mean cross entropy in nats, a scalar; but its gradient is that of the sum over tokens, scaled.

    Do not divide the loss by the number of accumulation steps.

    Args:
        logits: (..., classes), floating; computed in float32 at least.
        targets: (...), int64.
        mult: the multiplier of the logits (alpha_loss-softmax).
        ignore_index: the value of targets that do not count.
    """
    wide = scale_bwd(_at_least_float32(logits), multipliers.cross_entropy(logits.shape[-1]))
    wide = scale_fwd(wide, mult).flatten(0, -2)
    total = F.cross_entropy(wide, targets.flatten(), ignore_index=ignore_index, reduction="sum")
    return scale_fwd(total, 1 / (targets != ignore_index).sum())


def mse_loss(x: Tensor, target: Tensor) -> Tensor:
    """The mean squared error of tensors of one shape; but its gradient is that of the sum of squared errors, scaled.

    Raises:
        ValueError: the shapes differ.
    """
    if x.shape != target.shape:
        raise ValueError(
            f"got shapes {tuple(x.shape)} and {tuple(target.shape)}, expected equal ones; expand one first"
        )
    factor = multipliers.mse_loss()
    total = F.mse_loss(scale_bwd(x, factor), scale_bwd(target, factor), reduction="sum")
    return scale_fwd(total, 1 / max(x.numel(), 1))
