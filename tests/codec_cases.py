"""The coders of every 8-bit codec, and blocks of numbers for them. Hypothesis draws what makes a block.

Signed moments are coded as they are. Unsigned ones are coded by their root where ``codec.root``: ``x`` is what
:meth:`Codec.encode` is given.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from helpers import EIGHT_BIT
from shardopt.codec import CODECS, Moment

V = Moment("v", signed=False)
M = Moment("m", signed=True)


class Kind(NamedTuple):
    """One of the two coders of a codec."""

    codec: str
    signed: bool

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


def block(kind: Kind, seed: int, spread: float, size: int, largest: float = 1.0) -> Tensor:
    """A block with magnitudes up to ``largest`` and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn((2, size), generator=generator).double()
    x = normal[0] * (spread * normal[1]).exp()
    x[torch.rand(size, generator=generator) < 0.05] = 0.0
    x = (x / max(float(x.abs().max()), 1e-300) * largest).float()
    return x if kind.signed else x.abs()
