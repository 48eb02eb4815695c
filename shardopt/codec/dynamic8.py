"""dynamic8: the dynamic map of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861, section 1.3).

Numbers are rounded to the nearest value of the map, or within a step second moments at random to one of the two around
them; zero is exact, and no second moment above zero is rounded to zero.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardopt.codec.base import Codec, random_codes, units_in
from shardopt.kernels.numeric import float32, fma

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


class Lines(NamedTuple):
    """A piecewise linear function from magnitudes in [0, 1] to indices, which interpolates between the map's values.

    Eight parts begin at zero and at each decade's first value; a magnitude y lies in the last part whose ``start`` is
    below y. The function is ``line = slope * y + offset`` up to the decade's last value and ``line / 3 + knee`` beyond,
    as the space between two decades is three of the lower one's: always the lesser of both. Beyond the last decade it
    is ``top[0] * y + top[1]``.

    Within a decade the map's values are evenly spaced but for rounding: rounded, a position may be a neighbour of the
    nearest value's index only within 2**-15 of the spacing from the middle between both.
    """

    starts: Tensor  # float32, of all parts but the first, and infinity
    slopes: Tensor  # float32, as all that follow
    offsets: Tensor
    knees: Tensor
    top: Tensor


def lines(*, signed: bool) -> Lines:
    """Computes the :class:`Lines` of the signed or the unsigned map."""
    magnitudes, decades = dynamic_map(signed=signed)[127 if signed else 0 :].numpy(), np.arange(_DECADES)
    counts = 2 ** (decades if signed else decades + 1)
    firsts = counts if signed else counts - 1  # before a decade are zero and 1, 2, 4, ... (or 2, 4, ...) magnitudes
    starts, spaces = 10.0 ** (decades - 7), 0.9 * 10.0 ** (decades - 6) / counts
    last, top = len(magnitudes) - 1, 1 / (1 - magnitudes[-2])
    parts = (
        [*magnitudes[firsts], np.inf],
        [1 / magnitudes[1], *(1 / spaces)],
        [0.0, *(firsts - 0.5 - starts / spaces)],  # a decade's first value is half a space above its start
        [*(np.array([1, *(firsts + counts - 1)[:-1]]) * 2 / 3), last],  # no space follows the last decade
        [top, last - top],
    )
    return Lines(*(torch.tensor(np.array(x), dtype=torch.float32, device="cpu") for x in parts))


def _table(*, signed: bool) -> Tensor:
    """The kernels' lookup table of the signed or the unsigned map, in the layout of csrc/codecs/dynamic8.h."""
    return torch.cat([dynamic_map(signed=signed), *lines(signed=signed)])


class Dynamic8(Codec):
    name = "dynamic8"
    random = True
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
        y = (x.abs() * units_in(1, scales)).clamp(max=1)  # a tiny reciprocal is rounded coarsely
        part = torch.bucketize(y, line.starts)
        position = fma(y, line.slopes[part], line.offsets[part])
        position = torch.minimum(position, fma(position, float32(1 / 3), line.knees[part]))
        position = torch.maximum(position, fma(y, line.top[0], line.top[1]))
        if signed:
            index = torch.round(position).int()
            q = 127 + torch.where(x < 0, -index.clamp(max=127), index)  # there is a 1 but no -1
        else:
            index = torch.round(position).int() if random is None else random_codes(position, float32(1), random)
            q = torch.where(x > 0, index.clamp(min=1), 0)
        return q.to(torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        return self._maps[signed][0].to(codes.device)[codes.int()] * scales
