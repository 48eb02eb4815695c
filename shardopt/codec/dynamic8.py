"""dynamic8: the dynamic map of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861, section 1.3).

Nearest value, ties to the lower code; zero is exact, and a second moment above zero has a code above zero.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from shardopt.codec.base import Codec, scaled_by_maximum

_FIRST_BUCKET = (127 - 23) << 7  # the bits of 2^-23 above their 16th, as in csrc/codecs/dynamic8.h
_BUCKETS = (127 << 7) - _FIRST_BUCKET + 1


def dynamic_map(*, signed: bool) -> Tensor:
    """The 256 values of the map, float32, rising."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float32).numpy()
        centres = (edges[:-1] + edges[1:]) / np.float32(2)
        decade = (np.float32(10.0 ** (i - 6)) * centres).tolist()
        values += decade
        if signed:
            values += [-x for x in decade]
    return torch.tensor(sorted(values), dtype=torch.float32)


def boundaries(values: Tensor) -> Tensor:
    """The largest float32 not above the midpoint of each pair of neighbours: 255 values.

    The nearest code of x, ties to the lower one, is the number of boundaries below x.
    """
    midpoints = (values[:-1].double() + values[1:].double()) / 2
    rounded = midpoints.float()
    below = torch.nextafter(rounded, torch.tensor(-torch.inf))
    return torch.where(rounded.double() > midpoints, below, rounded)


def _lowest_codes(values: Tensor, *, negative: bool) -> Tensor:
    """The lowest code of the magnitudes that share their upper 16 bits (csrc/codecs/dynamic8.h)."""
    edges = boundaries(values)
    start = (torch.arange(_BUCKETS, dtype=torch.int32) + _FIRST_BUCKET) << 16
    smallest, largest = start.view(torch.float32), (start + 0xFFFF).view(torch.float32)
    smallest[0] = 0.0  # everything below 2^-23
    low, high = (-largest, -smallest) if negative else (smallest, largest)
    lowest, highest = torch.bucketize(low, edges), torch.bucketize(high, edges)
    assert bool((highest - lowest <= 1).all()), "a bucket holds two boundaries"
    return lowest.float()


class Dynamic8(Codec):
    name = "dynamic8"
    root = False
    signed_zero = 127

    @cached_property
    def _maps(self) -> dict[bool, tuple[Tensor, Tensor]]:
        maps = {signed: dynamic_map(signed=signed) for signed in (True, False)}
        return {signed: (values, boundaries(values)) for signed, values in maps.items()}

    @cached_property
    def table(self) -> Tensor:
        """Per map its values, its boundaries and the lowest codes of its buckets; the signed map, then the unsigned."""
        (signed, signed_edges), (unsigned, unsigned_edges) = self._maps[True], self._maps[False]
        infinity = torch.tensor([torch.inf])
        return torch.cat(
            [
                *(signed, signed_edges, infinity),
                *(_lowest_codes(signed, negative=side) for side in (False, True)),
                *(unsigned, unsigned_edges, infinity, _lowest_codes(unsigned, negative=False)),
            ]
        )

    def encode(self, x: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        edges = self._maps[signed][1].to(x.device)
        q = torch.bucketize(scaled_by_maximum(x, scales), edges)
        if not signed:
            q = torch.where(x > 0, q.clamp(min=1), q)
        return q.to(torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        return self._maps[signed][0].to(codes.device)[codes.int()] * scales
