"""The coders of every 8-bit codec, and blocks of numbers for them. Hypothesis draws what makes a block.

Signed moments are coded as they are. Unsigned ones are coded by their root where ``codec.root``: ``x`` is what
:meth:`Codec.encode` is given.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from helpers import EIGHT_BIT
from shardopt.codec import CODECS, Moment
from shardopt.kernels.numeric import square_root

V = Moment("v", signed=False)
M = Moment("m", signed=True)
EPS = 2.0**-24  # the largest relative error of one float32 operation


class Kind(NamedTuple):
    """One of the two coders of a codec."""

    codec: str
    signed: bool

    @property
    def of_roots(self) -> bool:
        """Whether what is coded are square roots."""
        return CODECS[self.codec].root and not self.signed

    def measure(self, x: Tensor) -> Tensor:
        return CODECS[self.codec].measure(x, signed=self.signed)

    def encode(self, x: Tensor, scales: Tensor) -> Tensor:
        return CODECS[self.codec].encode(x, scales, signed=self.signed)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return CODECS[self.codec].decode(codes, scales, signed=self.signed)

    def rank(self, codes: Tensor) -> Tensor:
        """Whole numbers in the order of the values that the codes stand for."""
        twos_complement = self.signed and self.codec != "dynamic8"
        return codes.view(torch.int8).int() if twos_complement else codes.int()


KINDS = [Kind(codec, signed) for codec in EIGHT_BIT for signed in (True, False)]
SIGNED = [kind for kind in KINDS if kind.signed]
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
    """The float32 nearest to ``1 / scales``, and its relative error: at most EPS, and more above 2^126 only."""
    inverse = torch.from_numpy(1 / scales.numpy())
    return inverse, (inverse.double() * scales.double() - 1).abs()
