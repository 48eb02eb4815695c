"""log4: both moments of Adam in one byte, rounded at random: 17 levels for the second, and 15 for the first.

All numbers are float32, rounded to nearest even; ``fma`` rounds once, and ``round(fma(...))`` rounds the exact value to
a whole number. ``bits(x)`` is the integer with the bits of ``x``: a piecewise linear logarithm, in which an octave is
2^23.

The second moment ``v`` is encoded by its root ``u = sqrt(v)``, as a level ``q`` from 1 to 17, or 0 where ``u = 0``. Per
block, with decoded root ``u'``::

    M = max u
    step = max(1, ceil(min(bits(M) - bits(smallest u above 0), 8 octaves) / 16))
    level(q) = the float whose bits are bits(M) - (17 - q) * step
    j = round(fma(bits(u) - (bits(M) + floor(step / 2)), 1 / step, 17)), from 1 to 16
    q = j + 1 where (u - level(j)) (u + level(j)) > h ((level(j + 1) - level(j)) (level(j + 1) + level(j))), else j
    u' = level(q)                                              0 where q = 0

``h`` is random, a multiple of 2^-16 in [0, 1): the levels around ``u`` are chosen with the probabilities for which the
mean of ``u'^2`` is ``v``. ``h`` depends on the step and the element's index (csrc/core/dither.h).

The first moment ``m`` is encoded in units of ``u'``, as a whole number ``c`` from -7 to 7, and so that the mean of
``m'``, the decoded moment, is ``m``. Per block, with another random ``h``::

    r = m * (1 / u')                                           0 where u' = 0
    s = max |r|, at least 2^-120                               0 where all r = 0
    y = |r| * (1 / s)
    j = round(fma(14 y, 1 / (y + 1), -1 / 2)), from 0 to 6
    |c| = j + 1 where y - T[j] > h (T[j + 1] - T[j]), else j
    m' = sign(r) * T[|c|] * s * u'                             T[j] is the y that solves j / 7 = 2 y / (1 + y)

The byte is ``q + 17 * (c modulo 15)``. The part of ``m`` that an element loses to rounding in a step can be repaid to
its weight in the same step (:class:`shardopt.AdamW`, ``repay``).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from shardopt.codec.base import units_in
from shardopt.codec.logarithmic import Logarithmic
from shardopt.kernels.numeric import bits, float_from_bits, fma, reciprocal, round_fma, round_to_int

_LEVELS = 17
_MAGNITUDES = 7
_SIGNED = 2 * _MAGNITUDES + 1
_OTHER = 0x9E3779B9  # makes the first moment's random bits of the second's


class Log4(Logarithmic):
    name = "log4"
    random = True
    steps = _LEVELS - 1
    most = 8 << 23  # 8 octaves

    @cached_property
    def table(self) -> Tensor:
        """The decoded values ``sign(c) T[|c|]`` by ``c`` modulo 15, and a zero as padding: float32, 16 of them."""
        c = np.arange(_MAGNITUDES + 1, dtype=np.float64)
        y = c / (2 * _MAGNITUDES - c)
        return torch.from_numpy(np.concatenate([y, -y[:0:-1], [0.0]]).astype(np.float32))

    def encode(self, x: Tensor, scales: Tensor, random: Tensor | None = None, *, signed: bool) -> Tensor:
        """Encodes one moment to its summand of the byte, ``q`` or ``17 * (c modulo 15)``; h = 1 / 2 without random."""
        if random is None:
            share = torch.full_like(x, 0.5)
        else:
            share = ((random * _OTHER if signed else random) >> 16 & 0xFFFF).float() / 65536
        return self._encode_signed(x, scales, share) if signed else self._encode_root(x, scales, share)

    def _encode_signed(self, x: Tensor, scales: Tensor, share: Tensor) -> Tensor:
        table, y = self.table.to(x.device), x.abs() * units_in(1, scales)
        z = fma(y * (2 * _MAGNITUDES), reciprocal(y + 1), torch.full_like(y, -0.5))
        lower = round_to_int(z).clamp(0, _MAGNITUDES - 1)
        low, high = table[lower], table[lower + 1]
        c = lower + (y - low > share * (high - low))
        return (torch.where((x < 0) & (c > 0), _SIGNED - c, c) * _LEVELS).to(torch.uint8)

    def _encode_root(self, x: Tensor, scales: Tensor, share: Tensor) -> Tensor:
        top, step = bits(scales[..., :1]), scales[..., 1:]
        whole = step.int()
        below = (bits(x) - (top + whole // 2)).float()
        lower = round_fma(below, reciprocal(step), _LEVELS).clamp(1, _LEVELS - 1)
        low, high = (float_from_bits(top - (_LEVELS - q) * whole) for q in (lower, lower + 1))
        goes_up = (x - low) * (x + low) > share * ((high - low) * (high + low))
        return torch.where(bits(x) == 0, 0, lower + goes_up).to(torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        c, q = _split(codes)
        if signed:
            return self.table.to(codes.device)[c] * scales
        top, step = bits(scales[..., :1]), scales[..., 1:].int()
        return float_from_bits(torch.where(q > 0, top - (_LEVELS - q) * step, 0))


def _split(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Splits bytes into ``c`` modulo 15, the first moment's code, and ``q``, the second moment's level: int32."""
    byte = codes.int()
    c = (byte - 1).clamp(min=0) // _LEVELS
    return c, byte - _LEVELS * c
