"""dynamic8: the dynamic map of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861, section 1.3).

Numbers are rounded to the nearest value of the map; zero is exact, and no second moment above zero is rounded to zero.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardopt.codec.base import Codec, units_in
from shardopt.kernels.numeric import fma

_DECADES = 7


def dynamic_map(*, signed: bool) -> Tensor:
    """The 256 float32 values of the map in ascending order: code ``q`` stands for value ``q`` times the scale."""
    values = [0.0, 1.0]
    for i in range(_DECADES):  # midpoints of 2^i (signed) or 2^(i + 1) equal parts of [0.1, 1], times 10^(i - 6)
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float32, device="cpu").numpy()
        centres = (edges[:-1] + edges[1:]) / np.float32(2)
        decade = (np.float32(10.0 ** (i - 6)) * centres).tolist()
        values += decade
        if signed:
            values += [-x for x in decade]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


def edges(*, signed: bool) -> Tensor:
    """Rounding boundaries: midpoints of neighbouring magnitudes of the map, each rounded down to float32."""
    values = dynamic_map(signed=signed)
    magnitudes = values[values >= 0].double()
    midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
    rounded = midpoints.float()
    below = torch.nextafter(rounded, torch.tensor(-torch.inf, device="cpu"))
    return torch.where(rounded.double() > midpoints, below, rounded)


class Lines(NamedTuple):
    """A piecewise linear function that quantizes without a search: magnitude in [0, 1] to index of the nearest value.

    The nine parts are zero, seven decades, and one. A magnitude y lies in the last part whose ``start`` is below y, and
    its index is that part's ``min(round(slope * y + offset), last)``. Within a decade the map's values are evenly
    spaced but for rounding: only within 2**-15 of the spacing from an :func:`edges` boundary may the neighbour result.
    """

    starts: Tensor  # float32, of all parts but the first
    slopes: Tensor  # float32
    offsets: Tensor  # float32
    lasts: Tensor  # int32


def lines(*, signed: bool) -> Lines:
    """Computes the :class:`Lines` of the signed or the unsigned map."""
    between = edges(signed=signed)
    counts = [2**decade if signed else 2 ** (decade + 1) for decade in range(_DECADES)]
    # The index of each part's first magnitude: the magnitudes before a decade are zero and 1, 2, 4, ... (or 2, 4, ...).
    firsts = [0, *(count if signed else count - 1 for count in counts), len(between)]
    slopes, offsets = [0.0], [0.0]
    for decade, (count, first) in enumerate(zip(counts, firsts[1:], strict=False)):
        start, space = 10.0 ** (decade - 7), 0.9 * 10.0 ** (decade - 6) / count
        slopes.append(1 / space)
        offsets.append(first - 0.5 - start / space)  # a decade's first value is half a space above its start
    return Lines(
        torch.stack([between[first - 1] for first in firsts[1:]]),
        torch.tensor([*slopes, 0.0], device="cpu"),
        torch.tensor([*offsets, float(len(between))], device="cpu"),
        torch.tensor([*(first - 1 for first in firsts[1:]), len(between)], dtype=torch.int32, device="cpu"),
    )


def _table(*, signed: bool) -> Tensor:
    """The kernels' lookup table of the signed or the unsigned map, in the layout of csrc/codecs/dynamic8.h."""
    line = lines(signed=signed)
    powers = torch.ldexp(torch.ones(33, device="cpu"), torch.arange(-31, 2, device="cpu"))
    within, before = torch.full((32,), torch.inf, device="cpu"), torch.zeros(32, dtype=torch.int32, device="cpu")
    for index in range(32):
        low, high = powers[index], powers[index + 1]
        before[index] = (line.starts < low).sum()
        for start in line.starts[(low <= line.starts) & (line.starts < high)]:  # at most one
            within[index] = start
    padding = (0, 16 - len(line.slopes))
    parts = (line.slopes, line.offsets, line.lasts.view(torch.float32))
    padded = [torch.nn.functional.pad(x, padding) for x in parts]
    return torch.cat([dynamic_map(signed=signed), within, before.view(torch.float32), *padded])


class Dynamic8(Codec):
    name = "dynamic8"
    root = False
    signed_zero = 127

    @cached_property
    def _maps(self) -> dict[bool, tuple[Tensor, Lines]]:
        return {signed: (dynamic_map(signed=signed), lines(signed=signed)) for signed in (True, False)}

    @cached_property
    def table(self) -> Tensor:
        """Lookup table for the kernels: the signed map's table, followed by the unsigned map's."""
        return torch.cat([_table(signed=True), _table(signed=False)])

    def encode(self, x: Tensor, scales: Tensor, random: Tensor | None = None, *, signed: bool) -> Tensor:
        line = Lines(*(values.to(x.device) for values in self._maps[signed][1]))
        y = x.abs() * units_in(1, scales)
        part = torch.bucketize(y, line.starts)
        index = torch.minimum(torch.round(fma(y, line.slopes[part], line.offsets[part])).int(), line.lasts[part])
        if signed:
            q = 127 + torch.where(x < 0, -index.clamp(max=127), index)  # there is a 1 but no -1
        else:
            q = torch.where(x > 0, index.clamp(min=1), index)
        return q.to(torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        return self._maps[signed][0].to(codes.device)[codes.int()] * scales
