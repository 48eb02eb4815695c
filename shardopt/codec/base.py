"""Base class of the codecs in pure PyTorch: blocks of float32 are quantized to codes and scales, and dequantized.

Compiled kernels (csrc/codecs) compute the same bits. PyTorch is used to convert state dicts, and in reference steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.numeric import bits, float_from_bits, fma, reciprocal, round_fma

#: The least scale of a block that is not all zeros: 254 times its reciprocal is finite, its smallest code is not zero.
LEAST_SCALE = 2.0**-120


class Coded(NamedTuple):
    """A quantized moment, as the optimizer's state stores it.

    ``codes`` has the codec's dtype; ``scales`` is float32, with ``codec.scales(...)`` values per block in its last
    dimension, or None for a codec without blocks (fp32, bf16).
    """

    codes: Tensor
    scales: Tensor | None


class Codec(ABC):
    """Base class of the codecs, each of which quantizes blocks of float32 numbers to codes with scales per block.

    Blocks have the shape ``(..., block_size)`` and scales ``(..., scales per block)``. A codec is a stateless
    singleton, which :func:`shardopt.codec.get_codec` returns.
    """

    name: str
    code_dtype: torch.dtype = torch.uint8
    #: Whether unsigned moments (averages of squared gradients) are quantized as their square root.
    root = True
    #: The code that decodes to zero in a signed moment.
    signed_zero = 0
    #: Whether a step chooses codes of unsigned moments at random, by the step count and the element's index.
    random = False
    #: The least scale of a block of square roots that is not all zeros: the smallest code's square is above zero.
    least_root_scale = 2.0**-66

    @property
    def index(self) -> int:
        """The number by which the compiled kernels identify the codec."""
        return int(_C.codecs[self.name]["index"])

    @property
    def relative(self) -> bool:
        """Whether the first moment is divided by the square root of the quantized second moment before coding."""
        return bool(_C.codecs[self.name]["relative"])

    @property
    def shared(self) -> bool:
        """Whether the first and the second moment are packed into one code: the sum of their separate codes (log4)."""
        return bool(_C.codecs[self.name]["shared"])

    @property
    def blockwise(self) -> bool:
        """Whether the codec quantizes in blocks with scales, rather than storing plain floats."""
        return self.scales(signed=True) > 0

    def scales(self, *, signed: bool) -> int:
        """Number of float32 scales that each block of a signed or an unsigned moment has; 0 for plain floats."""
        return int(_C.codecs[self.name]["signed_scales" if signed else "unsigned_scales"])

    def zero_code(self, *, signed: bool) -> int:
        """The code that decodes to zero, with which new state is filled."""
        return self.signed_zero if signed else 0

    @cached_property
    def table(self) -> Tensor | None:
        """Lookup table for the kernels, float32, 1-D, in the layout of csrc/codecs/<name>.h; None if they need none."""
        return None

    def extremes(self, x: Tensor, *, signed: bool) -> Tensor:
        """Two maxima per block ``x`` that determine its scales, and that ranks may all-reduce: int32, ``(..., 2)``."""
        largest = bits(x.abs().amax(-1))
        return torch.stack([largest, torch.zeros_like(largest)], dim=-1)

    def scales_for(self, extremes: Tensor, *, signed: bool) -> Tensor:
        """Computes the scales of blocks from their :meth:`extremes`."""
        largest = float_from_bits(extremes[..., :1])
        least = LEAST_SCALE if signed or not self.root else self.least_root_scale
        return torch.where(largest > 0, largest.clamp(min=least), largest)

    @abstractmethod
    def encode(self, x: Tensor, scales: Tensor, random: Tensor | None = None, *, signed: bool) -> Tensor:
        """Quantizes float32 blocks ``x`` to codes. Unsigned ``x`` holds square roots of the moment if ``self.root``.

        Random codecs choose codes by ``random`` (int64 in [0, 2^32), shape of ``x``; csrc/core/dither.h), if given.
        """

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        """Dequantizes codes to float32 blocks, the inverse of :meth:`encode` up to rounding."""

    def largest_codes(self, like: Tensor) -> Tensor:
        """Codes, all bits set, that decode to the largest value of an unsigned moment's block under its scales."""
        return torch.full_like(like, 255 if self.code_dtype == torch.uint8 else -1, dtype=self.code_dtype)

    def is_sound(self, codes: Tensor, scales: Tensor, *, signed: bool) -> bool:
        """Whether loaded codes and scales decode to finite values, which for unsigned moments are at least zero.

        Only scales are read: within a block no code decodes to more than the scale, or than the largest code does.
        """
        if signed:
            return are_finite(scales, signed=False)
        largest = self.decode(self.largest_codes(scales), scales, signed=False)
        return are_finite(scales, signed=False) and are_finite(largest * largest if self.root else largest, signed=True)


def are_finite(x: Tensor, *, signed: bool) -> bool:
    """Whether all numbers of a tensor are finite in float32 and, unless ``signed``, at least zero."""
    if x.numel() == 0:
        return True
    low, high = torch.stack(torch.aminmax(x if x.dtype.itemsize > 1 else x.float())).float().tolist()  # NaN if any is
    return bool(high < float("inf") and (low > float("-inf") if signed else low >= 0))


def units_in(number: float, scales: Tensor) -> Tensor:
    """``number / scales``, computed with the reciprocal; ``number`` itself for blocks of zeros, whose scale is 0."""
    return number * reciprocal(torch.where(scales > 0, scales, 1.0))


def random_codes(x: Tensor, y: Tensor, random: Tensor) -> Tensor:
    """One of the two codes (int32) around ``x * y``, which is from 0 to 255, by ``random`` so that the mean is kept.

    Floats from 256 to 512 have 15 bits after the point (``random_base`` in csrc/core/codec.h).
    """
    share = (random >> 17 & 0x7FFC | 2).float() * 2.0**-15
    return fma(x, y, 256 + share).floor().int() - 256


def int8_codes(x: Tensor, y: Tensor) -> Tensor:
    """The exact products ``x * y`` rounded to the nearest integer, ties to even: the bytes of int8, as uint8."""
    return round_fma(x, y).to(torch.int8).view(torch.uint8)


def signed_lookup(table: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Decodes signed codes ``q``, int8 stored as uint8, to ``sign(q) * table[|q|] * scale``."""
    q = codes.view(torch.int8).int()
    magnitude = table.to(codes.device)[q.abs()] * scales
    return torch.where(q < 0, -magnitude, magnitude)
