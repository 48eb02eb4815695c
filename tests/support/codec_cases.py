"""The coders of every blockwise codec, blocks of numbers for them, and dynamic8's codes by other means.

Hypothesis draws what makes a block.

Signed moments are coded as they are. Unsigned ones are coded by their root where ``codec.root``: ``x`` is what
:meth:`Codec.encode` is given.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from helpers import BLOCKWISE
from shardopt.codec import CODECS, Moment
from shardopt.codec.base import LEAST_SCALE
from shardopt.codec.dynamic8 import dynamic_map
from shardopt.kernels.numeric import square_root

V = Moment("v", signed=False)
M = Moment("m", signed=True)


class Kind(NamedTuple):
    """One of the two coders of a codec."""

    codec: str
    signed: bool

    @property
    def of_roots(self) -> bool:
        """Whether what is coded are square roots."""
        return CODECS[self.codec].root and not self.signed

    @property
    def least_scale(self) -> float:
        """The least scale of a block that is not all zeros; log8's roots have none."""
        return CODECS[self.codec].least_root_scale if self.of_roots else LEAST_SCALE

    def measure(self, x: Tensor) -> Tensor:
        codec = CODECS[self.codec]
        return codec.scales_for(codec.extremes(x, signed=self.signed), signed=self.signed)

    def encode(self, x: Tensor, scales: Tensor) -> Tensor:
        return CODECS[self.codec].encode(x, scales, signed=self.signed)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return CODECS[self.codec].decode(codes, scales, signed=self.signed)

    def rank(self, codes: Tensor) -> Tensor:
        """Whole numbers in the order of the values that the codes stand for."""
        if self.bits == 16:
            return codes.int() if self.signed else codes.int() & 0xFFFF
        return codes.view(torch.int8).int() if self.twos_complement else codes.int()

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 * CODECS[self.codec].code_dtype.itemsize

    @property
    def twos_complement(self) -> bool:
        """Whether codes are signed numbers."""
        return self.signed and self.codec != "dynamic8"

    @property
    def some_codes(self) -> Tensor:
        """All codes of 8 bits; of 16 bits the outermost ones, those around zero, and every 211th."""
        if self.bits == 8:
            return torch.arange(256, dtype=torch.int32).to(torch.uint8)
        sampled = torch.cat([torch.arange(-(2**15), 2**15, 211), torch.arange(-9, 10), torch.tensor([2**15 - 1])])
        return torch.cat([sampled, torch.tensor([1 - 2**15, 2 - 2**15])]).unique().to(torch.int16)


KINDS = [Kind(codec, signed) for codec in BLOCKWISE for signed in (True, False)]
seeds = st.integers(0, 2**32 - 1)
#: How many powers of e the magnitudes in a block spread over.
spreads = st.sampled_from([0.0, 0.1, 1.0, 4.0, 20.0])
sizes = st.sampled_from([1, 2, 31, 128, 257])
#: The largest magnitude of a block, anywhere in float32: those of roots are half as many powers of two from 1.
largest = st.builds(math.ldexp, st.floats(1, 2, exclude_max=True, width=32), st.integers(-149, 127))


def block(kind: Kind, seed: int, spread: float, size: int, largest: float = 1.0) -> Tensor:
    """A block with magnitudes up to ``largest``, or up to its root where roots are coded, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn((2, size), generator=generator).double()
    x = normal[0] * (spread * normal[1]).exp()
    x[torch.rand(size, generator=generator) < 0.05] = 0.0
    x = (x / max(float(x.abs().max()), 1e-300) * largest).float()
    if kind.of_roots:  # of numbers that float32 has, so none is below 2^-75
        return square_root(x.abs())
    return x if kind.signed else x.abs()


def reciprocal(scales: Tensor) -> tuple[Tensor, Tensor]:
    """The float32 nearest to ``1 / scales``, and its relative error: at most 2^-24, and more above 2^126 only."""
    inverse = torch.from_numpy(1 / scales.numpy())
    return inverse, (inverse.double() * scales.double() - 1).abs()


def numpy_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` of float32 numbers by way of float64, where the product is exact."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def exact_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The products of float32 numbers, in a type that has room for them and for a whole number beside them."""
    return a.astype(np.longdouble) * b


def nearest_in_dynamic_map(y: Tensor, *, signed: bool) -> Tensor:
    """The codes of the nearest of all values, of two the one nearer to zero; above zero not zero where unsigned.

    Differences between a float32 and the two values that it lies between are exact in float64.
    """
    values = dynamic_map(signed=signed).double()
    from_zero = values.abs().argsort(stable=True)
    chunks = y.double().split(2**14)
    codes = torch.cat([from_zero[(c[:, None] - values[from_zero]).abs().min(1).indices] for c in chunks]).int()
    return codes if signed else torch.where(y > 0, codes.clamp(min=1), 0)
