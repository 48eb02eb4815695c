"""Scales of log8 and log4, whose codes divide the range of a block's roots evenly in the bits of float32."""

from __future__ import annotations

import torch
from torch import Tensor

from shardopt.kernels.numeric import INFINITY_BITS, bits, float_from_bits


def measure_roots(x: Tensor, steps: int, most: int) -> Tensor:
    """The largest root ``M`` of each block, and the whole number ``step``: ``steps`` of them span the block's roots.

    Args:
        x: roots, float32, ``(..., block_size)``.
        steps: the number of steps from ``M`` to the smallest code above zero.
        most: the largest range, in units of the last bit; roots further below ``M`` are raised to the smallest code.

    Returns:
        float32, ``(..., 2)``.
    """
    b = bits(x)
    high = b.amax(-1)
    low = torch.where(b > 0, b, INFINITY_BITS).amin(-1)
    span = (high - low).clamp(max=most)
    step = ((span + steps - 1) // steps).clamp(min=1)
    return torch.stack([float_from_bits(high), step.float()], dim=-1)


def are_sound_roots(codes: Tensor, scales: Tensor, steps: int, most: int) -> bool:
    """Whether all codes decode to finite roots above zero, and in blocks of zeros to zero.

    ``M`` and ``step`` are then in the ranges of :func:`measure_roots`. In a block of zeros only code 0 has a value;
    its ``step`` is 1, or 0 before the first step of training. The roots of float32's numbers are at least 2^-74.5, so
    that all steps, however ``step`` was rounded, end above zero.

    Args:
        codes: ``(..., block_size)``.
        scales: as :func:`measure_roots` gives them.
        steps: as there.
        most: as there.
    """
    largest, step = scales.unbind(-1)
    top = bits(largest)
    zero = (top == 0) & ((step == 0) | (step == 1))
    whole = (step >= 1) & (step <= -(-most // steps)) & (step == step.round())
    sound = zero | (whole & (top > steps * step.int()) & (largest * largest).isfinite())
    return bool(sound.all()) and not bool(codes[zero].any())
