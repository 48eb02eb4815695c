"""How far rounding to codes may have moved the moments of a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.codec import CODECS, Coded
from shardopt.kernels.numeric import from_blocks
from shardopt.state.slice_spec import SliceSpec

#: Of codecs whose blocks have a range of their own: the ``step`` of blocks that span the largest range.
_LARGEST_STEPS = {"log8": -(-(32 << 23) // 254), "log4": -(-(8 << 23) // 16)}


class Rounded(NamedTuple):
    """A moment as stored, and how far rounding may have moved it.

    Attributes:
        value: the decoded moment, or its root where the moment ``has_root``: float32.
        error: the most that rounding moved the value by: half the larger of the distances to the two neighbouring
            values, or the full distance in a codec that rounds at random; of a moment in units of a root, in these
            units, as it was divided by the stored root. Float32.
        at_floor: where all smaller values have this code, too: the least one above zero of an unsigned moment. Bool.
    """

    value: Tensor
    error: Tensor
    at_floor: Tensor


def rounded(spec: SliceSpec, state: Mapping[str, Tensor]) -> Iterator[dict[str, Rounded]]:
    """The moments of a state in blocks, by name: 2-D, some rows at a time."""
    for rectangle, coded in spec.blocks_of([spec.local_coded(state, moment) for moment in spec.moments]):
        lead = rectangle.first_col % spec.grid.block_size
        in_blocks = _rounded_blocks(spec, coded)
        yield {
            name: Rounded(*(from_blocks(x, lead + rectangle.cols)[:, lead:] for x in moment))
            for name, moment in in_blocks.items()
        }


def _rounded_blocks(spec: SliceSpec, blocks: list[Coded]) -> dict[str, Rounded]:
    found: dict[str, Rounded] = {}
    stored_root: Tensor | None = None
    in_order = sorted(zip(spec.moments, blocks, strict=True), key=lambda pair: pair[0].signed)
    for moment, (codes, scales) in in_order:
        codec = moment.codec(spec.codec)
        x = codec.decode(codes, codes if scales is None else scales, signed=moment.signed)
        error, at_floor = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
        if scales is not None:
            error = rounding(codec.name, codes, scales, signed=moment.signed)
            at_floor = at_floor if moment.signed else is_at_floor(codec.name, codes, scales)
        if spec.codec.relative and not moment.signed and stored_root is None:
            stored_root = x
        elif stored_root is not None and moment.is_relative(spec.codec):
            x, error = x * stored_root, error * stored_root
        found[moment.name] = Rounded(x, error, at_floor)
    return found


def rounding(codec: str, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The most that rounding to these codes moved numbers by: float32. Roots below the least code are farther away."""
    own, whole = CODECS[codec], _numbers(codes)
    low, x, high = (
        own.decode(c, scales, signed=signed)
        for c in (_order(codec, signed=signed).below[whole], codes, _order(codec, signed=signed).above[whole])
    )
    farther = torch.maximum(x - low, high - x)
    return farther if own.random else farther / 2


def is_at_floor(codec: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Where an unsigned moment has the least code above zero, to which smaller numbers were raised: bool."""
    is_least = _order(codec, signed=False).level[_numbers(codes)] == 1
    return is_least & (scales[..., 1:] == _LARGEST_STEPS[codec]) if codec in _LARGEST_STEPS else is_least


class _Order(NamedTuple):
    """By code: its place among the values of all codes, and codes of the next smaller and the next larger value.

    Zero of an unsigned moment is no neighbour of others: only zero has the code of zero.
    """

    level: Tensor
    below: Tensor
    above: Tensor


@cache
def _order(name: str, *, signed: bool) -> _Order:
    codec = CODECS[name]
    codes = torch.arange(1 << 8 * codec.code_dtype.itemsize, dtype=torch.int32).to(codec.code_dtype)
    values = codec.decode(codes, torch.ones(codec.scales(signed=signed)), signed=signed)
    ordered, level = torch.unique(values, return_inverse=True)
    code_of = torch.empty(len(ordered), dtype=codec.code_dtype)
    code_of[level] = codes
    least = torch.where((level == 0) | signed, 0, 1)
    most = torch.where((level == 0) & (not signed), 0, len(ordered) - 1)
    return _Order(level, code_of[(level - 1).maximum(least)], code_of[(level + 1).minimum(most)])


def _numbers(codes: Tensor) -> Tensor:
    """Codes as whole numbers from 0 on."""
    return codes.long() & ((1 << 8 * codes.dtype.itemsize) - 1)
