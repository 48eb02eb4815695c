"""dynamic8: the dynamic map of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861, section 1.3).

Nearest value, ties toward zero; zero is exact, and a second moment above zero has a code above zero.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from shardopt.codec.base import Codec, units_in

_DECADES = 7


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


def edges(*, signed: bool) -> Tensor:
    """Between each two neighbouring magnitudes of the map the largest float32 not above their midpoint.

    The index of the magnitude nearest to y, counted from zero, ties toward zero, is the number of edges below y.
    """
    values = dynamic_map(signed=signed)
    magnitudes = values[values >= 0].double()
    midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
    rounded = midpoints.float()
    below = torch.nextafter(rounded, torch.tensor(-torch.inf))
    return torch.where(rounded.double() > midpoints, below, rounded)


def _table(*, signed: bool) -> Tensor:
    """What csrc/codecs/dynamic8.h looks up for one of the maps, laid out as it says there.

    Within a decade ``[10**(d - 7), 10**(d - 6)]`` the edges are evenly spaced, the first one a fifth of a space after
    the decade's start: a straight line, rounded, gives the index or the one below. 0.001 keeps it from giving the one
    above.
    """
    padded_edges = torch.full((256,), torch.inf)
    padded_edges[: len(edges(signed=signed))] = edges(signed=signed)
    starts = [10.0 ** (d - 7) for d in range(1, _DECADES)]
    start_within = torch.full((32,), torch.inf)
    decade_before = torch.zeros(32, dtype=torch.int32)
    for exponent in range(32):
        low, high = 2.0 ** (exponent - 31), 2.0 ** (exponent - 30)
        decade_before[exponent] = sum(start <= low for start in starts)
        for start in starts:
            if low < start < high:
                start_within[exponent] = start
    slopes, offsets = torch.zeros(16), torch.zeros(16)
    for decade in range(_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        first = 2**decade if signed else 2 ** (decade + 1) - 1
        start, space = 10.0 ** (decade - 7), 0.9 * 10.0 ** (decade - 6) / count
        slopes[decade] = 1 / space
        offsets[decade] = first - 0.5 - start / space - 0.2 - 0.001
    parts = [dynamic_map(signed=signed), padded_edges, start_within, decade_before.view(torch.float32), slopes, offsets]
    return torch.cat(parts)


class Dynamic8(Codec):
    name = "dynamic8"
    root = False
    signed_zero = 127

    @cached_property
    def _maps(self) -> dict[bool, tuple[Tensor, Tensor]]:
        return {signed: (dynamic_map(signed=signed), edges(signed=signed)) for signed in (True, False)}

    @cached_property
    def table(self) -> Tensor:
        """The signed map's part, then the unsigned one's."""
        return torch.cat([_table(signed=True), _table(signed=False)])

    def encode(self, x: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        index = torch.bucketize(x.abs() * units_in(1, scales), self._maps[signed][1].to(x.device))
        if signed:
            q = 127 + torch.where(x < 0, -index.clamp(max=127), index)  # there is a 1 but no -1
        else:
            q = torch.where(x > 0, index.clamp(min=1), index)
        return q.to(torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        return self._maps[signed][0].to(codes.device)[codes.int()] * scales
