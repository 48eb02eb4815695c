"""The two primitives of unit scaling: a factor in the forward pass alone, and one in the backward pass alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Scale(torch.autograd.Function):
    """``y = forward x``, and the gradient of x is ``backward`` times the gradient of y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float | Tensor, backward: float) -> Tensor:
        ctx.factor = backward
        return x.view_as(x) if isinstance(forward, float) and forward == 1.0 else x * forward

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return (gradient if ctx.factor == 1.0 else gradient * ctx.factor), None, None


def scale_fwd(x: Tensor, factor: float | Tensor) -> Tensor:
    """``factor * x``, with the gradient of x as if the factor were 1.

    Args:
        x: floating, any shape.
        factor: a number, or a tensor of one element that needs no gradient.
    """
    scaled: Tensor = _Scale.apply(x, factor, 1.0)  # type: ignore[no-untyped-call]
    return scaled


def scale_bwd(x: Tensor, factor: float) -> Tensor:
    """A view of ``x``, whose gradient is multiplied by ``factor``.

    Args:
        x: floating, any shape.
        factor: a number.
    """
    view: Tensor = _Scale.apply(x, 1.0, factor)  # type: ignore[no-untyped-call]
    return view
