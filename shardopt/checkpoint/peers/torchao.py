"""torchao.optim: moments are tensor subclasses where blocks divide the parameter, and float tensors elsewhere.

The subclasses are known by their names and attributes: torchao need not be there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.peers.base import Peer, PeerState
from shardopt.checkpoint.peers.coded import CodedMoment, check_blocks, is_map, of_map
from shardopt.checkpoint.peers.structure import are_floats, is_dense
from shardopt.checkpoint.wording import kind_of, shown
from shardopt.codec import Moment

_EIGHT_BIT = "OptimState8bit"
_OTHERS = ("OptimState4bit", "OptimStateFp8")  # without a codec of ours


class Torchao(Peer):
    name = "torchao"
    form = f"exp_avg and exp_avg_sq as {_EIGHT_BIT}, {' or '.join(_OTHERS)}"

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return any(type(value).__name__ in (_EIGHT_BIT, *_OTHERS) for value in state.values())

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> PeerState:
        found = super().read(state, group, expected, name)
        moments = {m.name: _read(found.moments[m.name], f"{name}: {m.name}", signed=m.signed) for m in expected}
        return found._replace(moments=moments)


def _read(value: Any, what: str, *, signed: bool) -> Tensor | CodedMoment:
    kind = type(value).__name__
    if kind in _OTHERS:
        return _dequantized(value, what)
    if kind != _EIGHT_BIT:
        return value  # type: ignore[no-any-return]
    codes, scales, values, of_sign = (getattr(value, key, None) for key in ("codes", "scale", "qmap", "signed"))
    if not is_dense(codes) or codes.dtype != torch.uint8 or of_sign is not signed:
        raise ValueError(
            f"{what}: got codes of {kind_of(codes)}, signed={shown(of_sign)}, expected uint8, signed={signed}"
        )
    if not are_floats(scales) or not is_map(values):
        raise ValueError(
            f"{what}: got scales of {kind_of(scales)} and a map of {kind_of(values)}, expected floats, and 256 of them "
            "in the map"
        )
    size = max(codes.numel() // max(scales.numel(), 1), 1)
    check_blocks(codes, scales, size, what)
    return of_map(codes, scales.float(), values, size, signed=signed)


def _dequantized(value: Any, what: str) -> Tensor:
    try:
        dequantized = value.dequantize()
    except Exception as error:  # torchao's own: it checks nothing
        raise ValueError(
            f"{what}: got {type(value).__name__} that torchao cannot dequantize ({type(error).__name__}), expected a "
            "whole one; save the state dict again"
        ) from error
    if not are_floats(dequantized):
        raise ValueError(f"{what}: got {kind_of(dequantized)} from dequantize(), expected floats")
    return dequantized
