"""Autograd functions with different factors forward and backward: scaling, and the matrix product of a linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: FP8 formats: E4M3 for weights and activations, E5M2, with more range, for gradients (arXiv 2209.05433).
_FORWARD, _GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_FORMATS = (_FORWARD, _GRADIENT)


class _Scale(torch.autograd.Function):
    """``y = factor x``, and the gradient of x is ``gradient_factor`` times the gradient of y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | Tensor, gradient_factor: float) -> Tensor:
        ctx.factor = gradient_factor
        return x.view_as(x) if isinstance(factor, float) and factor == 1.0 else x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return (gradient if ctx.factor == 1.0 else gradient * ctx.factor), None, None


def scale_fwd(x: Tensor, factor: float | Tensor) -> Tensor:
    """``factor * x``; the gradient passes to x unchanged. The factor is a number, or a tensor without a gradient."""
    scaled: Tensor = _Scale.apply(x, factor, 1.0)  # type: ignore[no-untyped-call]
    return scaled


def scale_bwd(x: Tensor, factor: float) -> Tensor:
    """A view of ``x``; the gradient that comes back through the view is multiplied by ``factor``."""
    view: Tensor = _Scale.apply(x, 1.0, factor)  # type: ignore[no-untyped-call]
    return view


def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to ``torch.float8_e4m3fn`` (up to 448) or ``torch.float8_e5m2`` (up to 57344).

    Numbers that are too large become the largest finite one, NaN stays.
    """
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


class _Product(torch.autograd.Function):
    """:func:`product`, whose arguments it takes, as an autograd function. Without FP8, x and weight have one dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, output: float, of_input: float, of_weight: float, fp8: bool
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = to_fp8(rows, _FORWARD) if fp8 else rows
        # The backward pass rounds the weight again: FSDP frees the gathered weight, but would not free a rounded copy.
        ctx.save_for_backward(rows, weight)
        ctx.input_factor, ctx.weight_factor = of_input, of_weight
        ctx.fp8, ctx.shape, ctx.dtype = fp8, x.shape, x.dtype
        operand = to_fp8(weight, _FORWARD) if fp8 else weight
        return _matmul(rows, operand.t(), output, x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0])
        gradient = to_fp8(gradient, _GRADIENT) if ctx.fp8 else gradient
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            operand = to_fp8(weight, _FORWARD) if ctx.fp8 else weight
            x_gradient = _matmul(gradient, operand, ctx.input_factor, ctx.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            weight_gradient = _matmul(gradient.t(), rows, ctx.weight_factor, weight.dtype)
        return x_gradient, weight_gradient, None, None, None, None


def product(
    x: Tensor, weight: Tensor, output: float = 1.0, of_input: float = 1.0, of_weight: float = 1.0, fp8: bool = False
) -> Tensor:
    """``output x weight^T``, (..., outputs); its gradients ``gradient weight``, ``gradient^T x`` have other factors.

    Products of narrower operands are accumulated and multiplied by their factor in float32, and then rounded. With
    ``fp8`` the operands are rounded without a scale, saturating: ``x`` and ``weight`` to E4M3, in the backward pass,
    too, and the gradient to E5M2. GPUs from compute capability 8.9 on then multiply in FP8 (``torch._scaled_mm``) if
    all sizes are multiples of 16; else the rounded numbers are multiplied in the dtype of the result.

    Args:
        x: (..., inputs); float64, float32, bfloat16 or float16, as the result; cast to autocast's dtype under autocast.
        weight: (outputs, inputs); cast to the dtype of x.
        output: factor of the result.
        of_input: factor of the gradient of x.
        of_weight: factor of the gradient of the weight.
        fp8: whether to multiply in FP8.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    weight = weight if fp8 else weight.to(x.dtype)
    result: Tensor = _Product.apply(x, weight, output, of_input, of_weight, fp8)  # type: ignore[no-untyped-call]
    return result


def _matmul(left: Tensor, right: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Computes ``factor * (left @ right)``, (m, k) by (k, n), rounded to ``dtype``; in FP8 where the GPU can."""
    if left.dtype in _FORMATS:
        if _multiplies_fp8(left, right):
            return _scaled_matmul(left, right, factor, dtype)
        left, right = left.to(dtype), right.to(dtype)
    # addmm multiplies by the factor before rounding, at no cost; with beta=0 the first argument is not read.
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=factor)


def _multiplies_fp8(left: Tensor, right: Tensor) -> bool:
    """Whether the GPU can multiply these FP8 matrices: from compute capability 8.9 on, sizes divisible by 16."""
    if left.device.type != "cuda" or torch.cuda.get_device_capability(left.device) < (8, 9):
        return False
    return all(size % 16 == 0 and size > 0 for size in (*left.shape, *right.shape))


def _scaled_matmul(left: Tensor, right: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Computes the product by ``torch._scaled_mm``, which needs ``left`` row-major and ``right`` column-major."""
    by_row, by_column = left.contiguous(), right.t().contiguous().t()
    scale, one = (torch.full((), value, device=left.device) for value in (factor, 1.0))
    return torch._scaled_mm(by_row, by_column, scale_a=scale, scale_b=one, out_dtype=dtype)
