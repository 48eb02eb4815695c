"""The codecs in Python: how blocks of float32 become codes and scales, and back, in pure PyTorch.

The kernels compute the same bits (csrc/codecs). This side serves the reference step and conversions of whole states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.numeric import bits, float_from_bits, reciprocal, round_fma

#: The least scale of a block that is not all zeros: 254 times its reciprocal is finite, its smallest code is not zero.
LEAST_SCALE = 2.0**-120
#: The least scale of roots with 8-bit codes: the square of the smallest code above zero is not zero.
LEAST_ROOT_SCALE = 2.0**-66


class Coded(NamedTuple):
    """A moment as stored.

    ``codes`` has the codec's dtype; ``scales`` is float32, one row of ``codec.scales(...)`` values per block, or None
    for a codec without blocks.
    """

    codes: Tensor
    scales: Tensor | None


class Codec(ABC):
    """Base class of the codecs.

    Blocks have the shape ``(..., block_size)`` and scales ``(..., scales per block)``. A codec is a stateless
    singleton: :func:`shardopt.codec.get_codec` gives it.
    """

    name: str
    code_dtype: torch.dtype = torch.uint8
    #: Unsigned moments are coded by their square root.
    root = True
    #: The code of zero in a signed moment.
    signed_zero = 0
    #: The least scale of a block of roots that is not all zeros.
    least_root_scale = LEAST_ROOT_SCALE

    @property
    def index(self) -> int:
        """The codec's place in the kernels' list."""
        return int(_C.codecs[self.name]["index"])

    @property
    def relative(self) -> bool:
        """Whether a signed moment is coded in units of the coded root of an unsigned one beside it."""
        return bool(_C.codecs[self.name]["relative"])

    @property
    def shared(self) -> bool:
        """Whether a signed and an unsigned moment have one code together: the sum of their codes."""
        return bool(_C.codecs[self.name]["shared"])

    @property
    def random(self) -> bool:
        """Whether moments are rounded at random."""
        return bool(_C.codecs[self.name]["random"])

    @property
    def blockwise(self) -> bool:
        """Whether the codec has blocks and scales."""
        return self.scales(signed=True) > 0

    def scales(self, *, signed: bool) -> int:
        """float32 scales per block."""
        return int(_C.codecs[self.name]["signed_scales" if signed else "unsigned_scales"])

    def zero_code(self, *, signed: bool) -> int:
        """The code of zero."""
        return self.signed_zero if signed else 0

    @cached_property
    def table(self) -> Tensor | None:
        """Table that the kernels look up, float32 and 1-D, laid out as csrc/codecs/<name>.h says; None without one."""
        return None

    def measure(self, x: Tensor, *, signed: bool) -> Tensor:
        """The scales of blocks ``x``: float32, ``(..., scales per block)``."""
        return self.scales_for(self.extremes(x, signed=signed), signed=signed)

    def extremes(self, x: Tensor, *, signed: bool) -> Tensor:
        """Maxima over the elements of blocks ``x``, from which scales follow: int32, ``(..., 2)``, >= 0."""
        largest = bits(x.abs().amax(-1))
        return torch.stack([largest, torch.zeros_like(largest)], dim=-1)

    def scales_for(self, extremes: Tensor, *, signed: bool) -> Tensor:
        """The scales of blocks with these :meth:`extremes`."""
        largest = float_from_bits(extremes[..., :1])
        least = LEAST_SCALE if signed or not self.root else self.least_root_scale
        return torch.where(largest > 0, largest.clamp(min=least), largest)

    @abstractmethod
    def encode(self, x: Tensor, scales: Tensor, random: Tensor | None = None, *, signed: bool) -> Tensor:
        """The codes of float32 blocks ``x``, in ``code_dtype``. Unsigned ``x`` is a root where ``self.root``.

        A codec that rounds at random takes random bits (int64 of the blocks' shape), if there are any.
        """

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        """The float32 values of ``codes``: the argument of :meth:`encode`, to the codec's precision."""

    def largest_codes(self, like: Tensor) -> Tensor:
        """Codes of a blockwise codec that stand for the largest number of an unsigned moment: all bits set."""
        return torch.full_like(like, 255 if self.code_dtype == torch.uint8 else -1, dtype=self.code_dtype)

    def is_sound(self, codes: Tensor, scales: Tensor, *, signed: bool) -> bool:
        """Whether blocks decode to finite numbers, not below zero where the moment is unsigned.

        Codes and scales that this package wrote are sound, unless the run diverged with ``nonfinite="propagate"``.
        Reads the scales, and only the codes that could be unsound.
        """
        if signed:
            return are_finite(scales, signed=False)
        largest = self.decode(self.largest_codes(scales), scales, signed=False)
        return are_finite(scales, signed=False) and are_finite(largest * largest if self.root else largest, signed=True)


def are_finite(x: Tensor, *, signed: bool) -> bool:
    """Whether all numbers of a tensor are finite in float32 and, unless ``signed``, at least zero."""
    if x.numel() == 0:
        return True
    low, high = (end.float() for end in torch.aminmax(x if x.dtype.itemsize > 1 else x.float()))
    return bool(low.isfinite() & high.isfinite() & ((low >= 0) | signed))  # aminmax gives NaN if there is one


def units_in(number: float, scales: Tensor) -> Tensor:
    """A number times the reciprocal of the scales; any number in blocks of zeros."""
    return number * reciprocal(torch.where(scales > 0, scales, 1.0))


def int8_codes(x: Tensor, y: Tensor) -> Tensor:
    """The whole numbers nearest to the exact products, ties to even, as two's complement int8 in uint8."""
    return round_fma(x, y).to(torch.int8).view(torch.uint8)


def signed_lookup(table: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """``sign * table[|q|] * scale`` of int8 codes ``q`` in uint8."""
    q = codes.view(torch.int8).int()
    magnitude = table.to(codes.device)[q.abs()] * scales
    return torch.where(q < 0, -magnitude, magnitude)
