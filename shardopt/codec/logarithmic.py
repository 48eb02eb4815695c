"""Scales of log8 and log4, whose codes divide the range of a block's roots evenly in the bits of float32."""

from __future__ import annotations

import torch
from torch import Tensor

from shardopt.codec.base import Codec
from shardopt.kernels.numeric import INFINITY_BITS, bits, float_from_bits


class Logarithmic(Codec):
    """Base class of the two: a block of roots has the scales ``M``, its largest root, and ``step``, a whole number.

    Attributes:
        steps: so many times ``step`` spans the block's roots, from ``M`` to the smallest code above zero.
        most: the largest range, in units of the last bit; roots further below ``M`` are raised to the smallest code.
    """

    steps: int
    most: int

    def extremes(self, x: Tensor, *, signed: bool) -> Tensor:
        """Signed: the largest magnitude. Unsigned: the largest root, and how far the smallest one is below infinity."""
        if signed:
            return super().extremes(x, signed=True)
        b = bits(x)
        return torch.stack([b.amax(-1), torch.where(b > 0, INFINITY_BITS - b, 0).amax(-1)], dim=-1)

    def scales_for(self, extremes: Tensor, *, signed: bool) -> Tensor:
        """Signed: the largest magnitude. Unsigned: ``M`` and ``step``."""
        if signed:
            return super().scales_for(extremes, signed=True)
        high, depth = extremes.unbind(-1)
        span = (high - (INFINITY_BITS - depth)).clamp(max=self.most)
        step = ((span + self.steps - 1) // self.steps).clamp(min=1)
        return torch.stack([float_from_bits(high), step.float()], dim=-1)

    def is_sound(self, codes: Tensor, scales: Tensor, *, signed: bool) -> bool:
        """See :meth:`Codec.is_sound`. Scales of roots are then in the ranges that :meth:`measure` gives.

        In a block of zeros only code 0 has a value; its ``step`` is 1, or 0 before the first step of training. The
        roots of float32's numbers are at least 2^-74.5, so that all steps, however ``step`` was rounded, end above
        zero.
        """
        if signed:
            return super().is_sound(codes, scales, signed=True)
        largest, step = scales.unbind(-1)
        top = bits(largest)
        zero = (top == 0) & ((step == 0) | (step == 1))
        whole = (step >= 1) & (step <= -(-self.most // self.steps)) & (step == step.round())
        sound = zero | (whole & (top > self.steps * step.int()) & (largest * largest).isfinite())
        return bool(sound.all()) and not bool(codes[zero].any())
