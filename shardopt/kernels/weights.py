"""Formats of 16-bit weights in PyTorch, master weights included, equal to csrc/core/weight.h bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.numeric import INFINITY_BITS, bits, float_from_bits, to_bf16

_TWO_WORDS = 2**64 - 1
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
_FLOAT16_BEGIN = 112 << 23  # difference of the exponents' biases, float32's minus float16's
_FLOAT16_NORMAL = 113 << 23  # float32 bits of 2^-14, float16's smallest normal number


@dataclass(frozen=True)
class WeightFormat:
    """Format in which a step reads and writes a parameter's weights: dtype, master weight bits, and rounding.

    Attributes:
        dtype: the parameter's dtype.
        low_bits: bits of the master weight that the state stores beside a bfloat16 or float16 parameter: 0, 8 or 16.
        stochastic: whether a step rounds weights stochastically.
    """

    dtype: torch.dtype
    low_bits: int = 0
    stochastic: bool = False

    @classmethod
    def from_options(cls, dtype: torch.dtype, options: Mapping[str, Any]) -> WeightFormat:
        """The format that a param group's options give to parameters of a dtype; float32 weights ignore the options.

        Raises:
            ValueError: stochastic rounding of a float16 parameter.
        """
        bits_wanted, stochastic = options["master_weight_bits"], options["stochastic_rounding"]
        if dtype == torch.float16 and stochastic:
            raise ValueError(
                "stochastic_rounding: got True for a parameter of torch.float16, expected torch.bfloat16 or "
                "torch.float32; use master_weight_bits, or put such parameters in a param group without it"
            )
        if dtype not in _INFINITY:
            return cls(dtype)
        return cls(dtype, 0 if bits_wanted is None else bits_wanted - 16, stochastic)

    @property
    def index(self) -> int:
        """The number by which the kernels identify the format (``_C.WeightFormat``)."""
        kind = f"_plus{self.low_bits}" if self.low_bits else "_stochastic" if self.stochastic else ""
        return int(_C.WeightFormat.__members__[str(self.dtype).removeprefix("torch.") + kind])

    def low_bits_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the state entry for low bits of a parameter of a shape; None for a format without low bits.

        The entry is int8. 16 low bits are stored as two bytes in a new last dimension, since collectives do not accept
        int16.
        """
        if self.low_bits == 0:
            return None
        return shape if self.low_bits == 8 else (*shape, 2)

    def load(self, param: Tensor, low_bits: Tensor | None) -> Tensor:
        """Combines a parameter and its low bits (if any) to the float32 weights from which a step computes."""
        if low_bits is None:
            return param.float()
        low = low_bits.contiguous().view(torch.int16).squeeze(-1) if self.low_bits == 16 else low_bits
        return join_weight(param, low, self.low_bits)

    def store(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rounds float32 weights to the format as a step does, but to nearest where a step rounds stochastically.

        Returns:
            The parameter, and its low bits: see :meth:`low_bits_shape`.
        """
        if self.low_bits:
            high, low = split_weight(x, self.low_bits, self.dtype)
            as_bytes = low.to(torch.int8) if self.low_bits == 8 else low.short().unsqueeze(-1).view(torch.int8)
            return high, as_bytes
        return to_bf16(x) if self.dtype == torch.bfloat16 else x.to(self.dtype), None


def split_weight(x: Tensor, low_bits: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Splits master weights into the nearest 16-bit float (ties away from zero) and low bits for the difference.

    The magnitude is first rounded to a word of ``16 + low_bits`` bits, to nearest even, but never to infinity: for
    bfloat16 the float32's upper bits, for float16 a number in units of ``2^(E - 10 - low_bits)``, where ``2^E`` is the
    largest power of two in it, at least 2^-14.

    Args:
        x: float32.
        low_bits: 8 or 16.
        dtype: bfloat16 or float16.

    Returns:
        A tensor of ``dtype``; and the low bits to be added to the magnitude, in units of the last bit: int32 in
        [-2^(low_bits - 1), 2^(low_bits - 1)).
    """
    infinity = _INFINITY[dtype] << low_bits
    last_place = 8 if (dtype, low_bits) == (torch.float16, 16) else 1  # float32's last bit below infinity, in the word
    b = bits(x).long()
    magnitude = b & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        word = _shifted(magnitude, low_bits - 16)
    else:
        # A float32's bits less _FLOAT16_BEGIN are a float16's, with 13 more bits of mantissa.
        normal = _shifted(magnitude - _FLOAT16_BEGIN, low_bits - 13)
        subnormal = (x.double().abs() * 2.0 ** (24 + low_bits)).round().clamp(max=1 << (10 + low_bits)).long()
        word = torch.where(magnitude < _FLOAT16_NORMAL, subnormal, normal)
    word = torch.where(magnitude < INFINITY_BITS, word.clamp(max=infinity - last_place), infinity)
    high = (word + (1 << (low_bits - 1))) >> low_bits
    low = word - (high << low_bits)
    high = torch.where(magnitude > INFINITY_BITS, _NAN[dtype], high)
    word = high | (b >> 16) & 0x8000
    return torch.where(word >= 0x8000, word - 0x10000, word).to(torch.int16).view(dtype), low.int()


def join_weight(high: Tensor, low: Tensor, low_bits: int) -> Tensor:
    """Restores float32 master weights from 16-bit floats and low bits, the inverse of :func:`split_weight`.

    Args:
        high: bfloat16 or float16.
        low: an integer dtype.
        low_bits: 8 or 16.
    """
    b = high.contiguous().view(torch.int16).long() & 0xFFFF
    word = (((b & 0x7FFF) << low_bits) + low.long()).clamp(min=0)  # below 0 if others set the parameter to zero
    if high.dtype == torch.bfloat16:
        magnitude = word << (16 - low_bits)
    else:
        wide = word << 5 if low_bits == 8 else word >> 3  # drops bits that a split weight never has
        subnormal = bits((word.double() * 2.0 ** -(24 + low_bits)).float()).long()
        finite = torch.where(word < 0x400 << low_bits, subnormal, wide + _FLOAT16_BEGIN)
        magnitude = torch.where(word < _INFINITY[torch.float16] << low_bits, finite, wide | INFINITY_BITS)
    return float_from_bits((magnitude | (b & 0x8000) << 16).int())


def _shifted(magnitude: Tensor, by: int) -> Tensor:
    """Shifts integers left by ``by`` bits, or right by ``-by`` bits with rounding to nearest, ties to even."""
    if by >= 0:
        return magnitude << by
    return (magnitude + (1 << (-by - 1)) - 1 + ((magnitude >> -by) & 1)) >> -by


def noise_key(seed: int, parameter: int) -> int:
    """A 64-bit key for the random numbers of a parameter's stochastic rounding, different for each parameter.

    Args:
        seed: the option ``stochastic_rounding_seed``.
        parameter: the parameter's number in the model or the optimizer.
    """
    x = (seed + 0x9E3779B97F4A7C15) & _TWO_WORDS  # the finalizer of splitmix64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _TWO_WORDS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _TWO_WORDS
    return ((x ^ (x >> 31)) + parameter) & _TWO_WORDS
