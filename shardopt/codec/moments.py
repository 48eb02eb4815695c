"""Coding all moments of a rule together: a relative codec stores signed ones in units of the unsigned one's root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.codec.base import Codec, Coded
from shardopt.kernels.numeric import reciprocal, square_root


class Moment(NamedTuple):
    """A moment that a rule keeps, under torch's name for it."""

    name: str
    signed: bool


class Decoded(NamedTuple):
    """The values of the moments, and of the unsigned one the root as stored (None without one)."""

    values: list[Tensor]
    root: Tensor | None


def encode_moments(
    codec: Codec, moments: Sequence[Moment], values: Sequence[Tensor], root: Tensor | None = None
) -> list[Coded]:
    """Codes the moments of one parameter.

    Args:
        codec: the codec.
        moments: the rule's moments, at most one of them unsigned.
        values: float32 blocks ``(..., block_size)``, one tensor per moment.
        root: the square root of the unsigned moment, where the caller has it already.

    Returns:
        One :class:`Coded` per moment, scales of shape ``(..., scales per block)``.
    """
    coded: dict[str, Coded] = {}
    unit: Tensor | None = None
    for moment, x in sorted(zip(moments, values, strict=True), key=lambda pair: pair[0].signed):
        if not moment.signed:
            x = x if not codec.root else square_root(x) if root is None else root
        elif unit is not None:
            x = torch.where(unit > 0, x * reciprocal(unit), 0.0)
        scales = codec.measure(x, signed=moment.signed) if codec.blockwise else x
        codes = codec.encode(x, scales, signed=moment.signed)
        if codec.relative and not moment.signed:
            unit = codec.decode(codes, scales, signed=False)
        coded[moment.name] = Coded(codes, scales if codec.blockwise else None)
    return [coded[moment.name] for moment in moments]


def decode_moments(codec: Codec, moments: Sequence[Moment], coded: Sequence[Coded]) -> Decoded:
    """The inverse of :func:`encode_moments`: float32 blocks."""
    values: dict[str, Tensor] = {}
    root: Tensor | None = None
    for moment, (codes, scales) in sorted(zip(moments, coded, strict=True), key=lambda pair: pair[0].signed):
        x = codec.decode(codes, codes if scales is None else scales, signed=moment.signed)
        if not moment.signed:
            root = x if codec.root else square_root(x)
            x = x * x if codec.root else x
        elif root is not None and codec.relative:
            x = x * root
        values[moment.name] = x
    return Decoded([values[moment.name] for moment in moments], root)
