"""Scales of log8 and log4, which quantize the square root of the second moment logarithmically, by its float32 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from shardopt.codec.base import Codec
from shardopt.kernels.numeric import INFINITY_BITS, bits, float_from_bits


class Logarithmic(Codec):
    """Base class of log8 and log4: a block of square roots has two scales, its largest root ``M`` and ``step``.

    Attributes:
        steps: number of intervals between ``M`` and the smallest level above zero; each is ``step`` float32 bit values.
        most: largest range of all intervals in float32 bit values; smaller roots are raised to the smallest level.
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
        """See :meth:`Codec.is_sound`. Square roots also need ``M`` and ``step`` within :meth:`scales_for`'s ranges.

        A block of zeros may have only code 0, and a ``step`` of 1, or 0 before the first step of training. Square
        roots of float32 numbers above zero are at least 2^-74.5, so that the smallest level is above zero, however
        ``step`` was rounded.
        """
        if signed:
            return super().is_sound(codes, scales, signed=True)
        largest, step = scales.unbind(-1)
        top = bits(largest)
        zero = (top == 0) & ((step == 0) | (step == 1))
        whole = (step >= 1) & (step <= -(-self.most // self.steps)) & (step == step.round())
        sound = zero | (whole & (top > self.steps * step.int()) & (largest * largest).isfinite())
        return bool(sound.all()) and not bool(codes[zero].any())
