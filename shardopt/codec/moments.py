"""Quantizes all moments of a parameter together, as log8 and log4 divide the first moment by the second's root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Describes a moment that an update rule keeps per parameter, such as Adam's ``exp_avg``.

    Attributes:
        name: torch's name for the moment, with which its entries in the state begin.
        signed: whether values may be negative, as in an average of gradients.
        own_units: whether a signed moment is no average of gradients, and is thus never divided by the root of the
            second moment before coding.
        wide: whether a signed moment averages too slowly for 8 bits: 16-bit codes, or float32 if the codec is plain.
        exact: whether a signed moment is stored as float32 with every codec.
        magnitude: whether an unsigned moment has the units of gradients, not of their squares (coded without a root).
        initial: an unsigned moment's value in all elements before the first step.
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
        """The moment's kind under the name that the compiled rules (``_C.rules``) have for it."""
        if self.exact:
            return "exact"
        if self.signed:
            return "wide" if self.wide else "own_units" if self.own_units else "signed"
        return "magnitude" if self.magnitude else "unsigned"

    def codec(self, codec: Codec) -> Codec:
        """The codec for this moment if the optimizer's codec is ``codec``: wide and exact moments have their own."""
        if self.exact:
            return _EXACT
        if not self.wide:
            return codec
        return _WIDE if codec.blockwise else _EXACT

    def has_root(self, codec: Codec) -> bool:
        """Whether the codec quantizes the moment's square root instead of the moment."""
        return codec.root and not self.signed and not self.magnitude

    def is_relative(self, codec: Codec) -> bool:
        """Whether the moment is divided by the quantized root of the rule's first unsigned moment before coding."""
        return codec.relative and self.kind == "signed"


class Decoded(NamedTuple):
    """Dequantized moments, and the dequantized square roots of moments for which ``Moment.has_root`` is true."""

    values: list[Tensor]
    roots: list[Tensor]


def encode_moments(
    codec: Codec,
    moments: Sequence[Moment],
    values: Sequence[Tensor],
    roots: Sequence[Tensor] | None = None,
    random: Tensor | None = None,
    agree: Callable[[Moment, Tensor], Tensor] | None = None,
) -> list[Coded]:
    """Quantizes the moments of one parameter.

    Args:
        codec: the codec of the state.
        moments: the rule's moments.
        values: float32 blocks ``(..., block_size)``, one tensor per moment.
        roots: the square roots of the moments that ``has_root``, where the caller has them already.
        random: int64 of the blocks' shape, random bits for a codec that rounds at random; None: rounds to nearest.
        agree: given a moment's ``Codec.extremes`` on this rank, returns them over all ranks with parts of the blocks.

    Returns:
        One :class:`Coded` per moment, scales of shape ``(..., scales per block)``. With a codec that packs two moments
        into one code (log4), both have that same code.
    """
    coded: dict[str, Coded] = {}
    stored_root: Tensor | None = None
    known = iter(roots or ())
    for moment, x in _unsigned_first(moments, values):
        moment_codec = moment.codec(codec)
        if moment.has_root(codec):
            x = square_root(x) if roots is None else next(known)
        elif stored_root is not None and moment.is_relative(codec):
            x = torch.where(stored_root > 0, x * reciprocal(stored_root), 0.0)
        scales = x
        if moment_codec.blockwise:
            extremes = moment_codec.extremes(x, signed=moment.signed)
            extremes = extremes if agree is None else agree(moment, extremes)
            scales = moment_codec.scales_for(extremes, signed=moment.signed)
        codes = moment_codec.encode(x, scales, random, signed=moment.signed)
        if codec.relative and not moment.signed and stored_root is None:
            stored_root = codec.decode(codes, scales, signed=False)
        coded[moment.name] = Coded(codes, scales if moment_codec.blockwise else None)
    in_order = [coded[moment.name] for moment in moments]
    if not codec.shared:
        return in_order
    codes = reduce(torch.add, [part.codes for part in in_order])
    return [part._replace(codes=codes) for part in in_order]


def decode_moments(codec: Codec, moments: Sequence[Moment], coded: Sequence[Coded]) -> Decoded:
    """Dequantizes the moments of one parameter to float32 blocks, the inverse of :func:`encode_moments`."""
    values: dict[str, Tensor] = {}
    roots: list[Tensor] = []
    stored_root: Tensor | None = None
    for moment, (codes, scales) in _unsigned_first(moments, coded):
        x = moment.codec(codec).decode(codes, codes if scales is None else scales, signed=moment.signed)
        if codec.relative and not moment.signed and stored_root is None:
            stored_root = x
        elif stored_root is not None and moment.is_relative(codec):
            x = x * stored_root
        if moment.has_root(codec):
            roots.append(x)
            x = x * x
        values[moment.name] = x
    return Decoded([values[moment.name] for moment in moments], roots)


def _unsigned_first(moments: Sequence[Moment], values: Sequence[_T]) -> list[tuple[Moment, _T]]:
    return sorted(zip(moments, values, strict=True), key=lambda pair: pair[0].signed)
