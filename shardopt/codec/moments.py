"""Coding all moments of a rule together: a relative codec stores signed ones in units of the unsigned one's root."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from shardopt.codec.base import Codec, Coded
from shardopt.codec.companded16 import Companded16
from shardopt.codec.plain import Float32
from shardopt.kernels.numeric import reciprocal, square_root

_WIDE, _EXACT = Companded16(), Float32()
_T = TypeVar("_T")


class Moment(NamedTuple):
    """A moment that a rule keeps, under torch's name for it.

    Attributes:
        name: the name of its state entries.
        signed: whether it may be below zero.
        own_units: of a signed one, that it is no average of gradients: never coded in units of an unsigned one's root.
        wide: of a signed one, that it averages too slowly for 8 bits: coded in 16, or in float32 beside moments without
            blocks.
        exact: of a signed one, that it is float32 whatever the codec.
        magnitude: of an unsigned one, that it has the units of gradients, not of their squares.
        initial: of an unsigned one, the value of all elements before the first step.
    """

    name: str
    signed: bool
    own_units: bool = False
    wide: bool = False
    exact: bool = False
    magnitude: bool = False
    initial: float = 0.0

    @property
    def kind(self) -> str:
        """The moment's kind, as ``_C.rules`` names it."""
        if self.exact:
            return "exact"
        if self.signed:
            return "wide" if self.wide else "own_units" if self.own_units else "signed"
        return "magnitude" if self.magnitude else "unsigned"

    def codec(self, codec: Codec) -> Codec:
        """The codec of the moment in a state of this codec."""
        if self.exact:
            return _EXACT
        if not self.wide:
            return codec
        return _WIDE if codec.blockwise else _EXACT

    def has_root(self, codec: Codec) -> bool:
        """Whether the moment is coded by its root."""
        return codec.root and not self.signed and not self.magnitude

    def is_relative(self, codec: Codec) -> bool:
        """Whether the moment is coded in units of the first unsigned one's coded root, if the rule keeps one."""
        return codec.relative and self.kind == "signed"


class Decoded(NamedTuple):
    """The values of the moments, and the roots as stored of those that ``has_root``, in the same order."""

    values: list[Tensor]
    roots: list[Tensor]


class Rounded(NamedTuple):
    """A moment as stored, and how far rounding may have moved it.

    Attributes:
        value: the decoded moment; of one that ``has_root``, the root: float32.
        error: the most that rounding moved it by, see :meth:`Codec.rounding`: float32.
        at_floor: where anything smaller is stored as the same, see :meth:`Codec.at_floor`: bool.
    """

    value: Tensor
    error: Tensor
    at_floor: Tensor


def encode_moments(
    codec: Codec,
    moments: Sequence[Moment],
    values: Sequence[Tensor],
    roots: Sequence[Tensor] | None = None,
    random: Tensor | None = None,
) -> list[Coded]:
    """Codes the moments of one parameter.

    Args:
        codec: the codec of the state.
        moments: the rule's moments.
        values: float32 blocks ``(..., block_size)``, one tensor per moment.
        roots: the square roots of the moments that ``has_root``, where the caller has them already.
        random: int64 of the blocks' shape, random bits for a codec that rounds at random; None: it rounds to nearest.

    Returns:
        One :class:`Coded` per moment, scales of shape ``(..., scales per block)``. Moments that share a code both
        have it.
    """
    coded: dict[str, Coded] = {}
    unit: Tensor | None = None
    known = iter(roots or ())
    for moment, x in _unsigned_first(moments, values):
        own = moment.codec(codec)
        if moment.has_root(codec):
            x = square_root(x) if roots is None else next(known)
        elif unit is not None and moment.is_relative(codec):
            x = torch.where(unit > 0, x * reciprocal(unit), 0.0)
        scales = own.measure(x, signed=moment.signed) if own.blockwise else x
        if random is None:
            codes = own.encode(x, scales, signed=moment.signed)
        else:
            codes = own.encode_at_random(x, scales, random, signed=moment.signed)
        if codec.relative and not moment.signed and unit is None:
            unit = codec.decode(codes, scales, signed=False)
        coded[moment.name] = Coded(codes, scales if own.blockwise else None)
    found = [coded[moment.name] for moment in moments]
    if not codec.shared:
        return found
    codes = reduce(torch.add, [each.codes for each in found])
    return [each._replace(codes=codes) for each in found]


def decode_moments(codec: Codec, moments: Sequence[Moment], coded: Sequence[Coded]) -> Decoded:
    """The inverse of :func:`encode_moments`: float32 blocks."""
    values: dict[str, Tensor] = {}
    roots: list[Tensor] = []
    unit: Tensor | None = None
    for moment, (codes, scales) in _unsigned_first(moments, coded):
        x = moment.codec(codec).decode(codes, codes if scales is None else scales, signed=moment.signed)
        if codec.relative and not moment.signed and unit is None:
            unit = x
        elif unit is not None and moment.is_relative(codec):
            x = x * unit
        if moment.has_root(codec):
            roots.append(x)
            x = x * x
        values[moment.name] = x
    return Decoded([values[moment.name] for moment in moments], roots)


def rounded_moments(codec: Codec, moments: Sequence[Moment], coded: Sequence[Coded]) -> list[Rounded]:
    """Moments with what rounding may have changed.

    Moments in units of the root beside them were divided by this root as stored: its error does not add to theirs.
    """
    found: dict[str, Rounded] = {}
    unit: Tensor | None = None
    for moment, (codes, scales) in _unsigned_first(moments, coded):
        own = moment.codec(codec)
        x = own.decode(codes, codes if scales is None else scales, signed=moment.signed)
        error, at_floor = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
        if scales is not None:
            error = own.rounding(codes, scales, signed=moment.signed)
            at_floor = at_floor if moment.signed else own.at_floor(codes, scales)
        if codec.relative and not moment.signed and unit is None:
            unit = x
        elif unit is not None and moment.is_relative(codec):
            x, error = x * unit, error * unit
        found[moment.name] = Rounded(x, error, at_floor)
    return [found[moment.name] for moment in moments]


def _unsigned_first(moments: Sequence[Moment], values: Sequence[_T]) -> list[tuple[Moment, _T]]:
    return sorted(zip(moments, values, strict=True), key=lambda pair: pair[0].signed)
