"""flashoptim: int8 and uint8 codes with float16 scales for groups of 32 elements of the flattened parameter.

``q / 127 = 2 y / (1 + |y|)`` of ``y = m / scale``, and ``q / 255 = sqrt(v) / scale``: companded8's formulas, so codes
and scales go over as they are. Decoded, a second moment differs by float32's rounding, which is done in another order.
One above zero that has the code 0, which companded8 never gives, is 0 here as it is there. ``error_bits`` are another
form of low bits than ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardopt.checkpoint.peers.base import Peer, PeerState
from shardopt.checkpoint.peers.coded import CodedMoment, check_blocks, of_companding
from shardopt.checkpoint.peers.structure import are_floats, is_dense
from shardopt.checkpoint.wording import kind_of
from shardopt.codec import Moment

_GROUP = 32
_CODES, _SCALES, _LOW_BITS = "::quantized", "::scales", "error_bits"


class Flashoptim(Peer):
    name = "flashoptim"
    form = f"exp_avg{_CODES} and exp_avg{_SCALES}"
    extra = frozenset([_LOW_BITS])

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return any(key.endswith(_CODES) for key in state) or _LOW_BITS in state

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> PeerState:
        coded = {key.removesuffix(_CODES) for key in state if key.endswith(_CODES)}
        rest = {key: value for key, value in state.items() if not key.endswith((_CODES, _SCALES))}
        found = super().read({**rest, **dict.fromkeys(coded)}, group, expected, name)
        moments = {m.name: _read(state, m, name) for m in expected if m.name in coded}
        return found._replace(moments={**found.moments, **moments})


def _read(state: Mapping[str, Any], moment: Moment, name: str) -> CodedMoment:
    what = f"{name}: {moment.name}"
    codes, scales = state[moment.name + _CODES], state.get(moment.name + _SCALES)
    dtype = torch.int8 if moment.signed else torch.uint8
    if not is_dense(codes) or codes.dtype != dtype or not are_floats(scales):
        got = "no scales" if scales is None else f"scales of {kind_of(scales)} and codes of {kind_of(codes)}"
        raise ValueError(f"{what}: got {got}, expected {dtype} codes and float16 scales")
    if scales.dtype == torch.bfloat16:  # beside bfloat16 parameters they are float16's bits under that name
        scales = scales.view(torch.float16)
    check_blocks(codes, scales, _GROUP, what)
    return of_companding(codes, scales, _GROUP, signed=moment.signed)
