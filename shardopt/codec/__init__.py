"""Codecs, which quantize optimizer moments from float32 to 4, 8 or 16 bits and back, looked up by name."""

from __future__ import annotations

from shardopt import _C
from shardopt.codec.base import Codec, Coded
from shardopt.codec.companded8 import Companded8
from shardopt.codec.companded16 import Companded16
from shardopt.codec.dynamic8 import Dynamic8
from shardopt.codec.log4 import Log4
from shardopt.codec.log8 import Log8
from shardopt.codec.moments import Decoded, Moment, decode_moments, encode_moments
from shardopt.codec.plain import BFloat16, Float32

__all__ = ["CODECS", "Codec", "Coded", "Decoded", "Moment", "decode_moments", "encode_moments", "get_codec"]

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Log8(), Companded8(), Dynamic8(), Companded16(), Log4(), BFloat16(), Float32())
}
assert set(CODECS) == set(_C.codecs), "the extension was built for other codecs: reinstall shardopt"


def get_codec(name: str) -> Codec:
    """Looks up the codec that an optimizer's ``codec`` option names, such as "log8".

    Raises:
        ValueError: no codec has the name.
    """
    if name not in CODECS:
        raise ValueError(f"codec: got {name!r}, expected one of {', '.join(map(repr, CODECS))}")
    return CODECS[name]
