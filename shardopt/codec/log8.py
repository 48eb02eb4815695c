"""log8: a logarithmic second moment scaled to each block's range, and the first moment divided by the second's root.

Every element's update then has the same small relative error, however unlike its neighbours it is. All numbers are
float32, rounded to nearest even; ``fma`` rounds once, and ``round(fma(...))`` rounds the exact value to a whole number.
``bits(x)`` is the integer with the bits of ``x``: a piecewise linear logarithm, in which an octave is 2^23.

The second moment ``v`` is encoded by its root ``u = sqrt(v)``. Per block, with code ``q`` and decoded root ``u'``::

    M = max u
    step = max(1, ceil(min(bits(M) - bits(smallest u above 0), 32 octaves) / 254))
    q = max(1, round(fma(bits(u) - bits(M), 1 / step, 255)))    0 where u = 0
    q = max(1, floor(fma(bits(u) - bits(M), 1 / step, 511 + h)) - 256) within a step
    u' = the float whose bits are bits(M) - (255 - q) * step    0 where q = 0

``h`` is random, an odd multiple of 2^-15 in (0, 1), and the ``fma`` is rounded to a multiple of 2^-15: a step takes one
of the two codes around ``u``, so that averages keep their level (docs/codecs.md).

The first moment ``m`` is encoded in units of ``u'``, which is 1 in a rule without a second moment. Per block, with code
``q`` and decoded moment ``m'``::

    r = m * (1 / u')                                            0 where u' = 0
    s = max |r|, at least 2^-120                                0 where all r = 0
    y = r * (1 / s)
    q = round(fma(y, fma(-0.7 * 127, |y|, 1.7 * 127), 0))
    m' = sign(q) * T[|q|] * s * u'                              T[|q|] is the y that solves |q| / 127 = y (1.7 - 0.7 y)
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from shardopt.codec.base import int8_codes, signed_lookup, units_in
from shardopt.codec.logarithmic import Logarithmic
from shardopt.kernels.numeric import bits, float32, float_from_bits, fma, reciprocal, round_fma


class Log8(Logarithmic):
    name = "log8"
    random = True
    steps = 254
    most = 32 << 23  # 32 octaves

    @cached_property
    def table(self) -> Tensor:
        """The inverse of ``z = y (1.7 - 0.7 y)`` at ``z = q / 127``; one more entry for the code -128."""
        z = np.minimum(np.arange(129, dtype=np.float64) / 127, 1.0)
        y = (1.7 - np.sqrt(1.7 * 1.7 - 2.8 * z)) / 1.4
        y[127:] = 1.0
        return torch.from_numpy(y.astype(np.float32))

    def encode(self, x: Tensor, scales: Tensor, random: Tensor | None = None, *, signed: bool) -> Tensor:
        if signed:
            y = x * units_in(1, scales)
            return int8_codes(y, fma(float32(-0.7) * 127, y.abs(), float32(1.7) * 127))
        top, step = bits(scales[..., :1]), scales[..., 1:]
        below = (bits(x) - top).float()
        if random is None:
            q = round_fma(below, reciprocal(step), 255)
        else:  # floats from 256 to 512 are multiples of 2^-15
            h = (random >> 17 | 1).float() * 2.0**-15
            q = fma(below, reciprocal(step), 511 + h).floor().int() - 256
        return torch.where(x > 0, q.clamp(min=1), 0).to(torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        if signed:
            return signed_lookup(self.table, codes, scales)
        top, step = bits(scales[..., :1]), scales[..., 1:].int()
        q = codes.int()
        return float_from_bits(torch.where(q > 0, top - (255 - q) * step, 0))
