"""torchao.optim: moments are tensor subclasses where blocks divide the parameter, and float tensors elsewhere.

The subclasses are known by their names and attributes: torchao need not be there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.foreign.moments import CodedMoment, check_blocks, of_map
from shardopt.checkpoint.foreign.peer import Moments, Peer
from shardopt.codec import Moment

_EIGHT_BIT = "OptimState8bit"
_OTHERS = ("OptimState4bit", "OptimStateFp8")  # without a codec of ours


class Torchao(Peer):
    name = "torchao"
    form = f"exp_avg and exp_avg_sq as {_EIGHT_BIT}, {' or '.join(_OTHERS)}"

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return any(type(value).__name__ in (_EIGHT_BIT, *_OTHERS) for value in state.values())

    def moments(self, state: Mapping[str, Any], expected: Sequence[Moment], name: str) -> Moments:
        found = super().moments(state, expected, name)
        return {m.name: _read(found[m.name], f"{name}: {m.name}", signed=m.signed) for m in expected}


def _read(value: Any, what: str, *, signed: bool) -> Tensor | CodedMoment:
    kind = type(value).__name__
    if kind in _OTHERS:
        dequantized: Tensor = value.dequantize()
        return dequantized
    if kind != _EIGHT_BIT:
        return value  # type: ignore[no-any-return]
    codes, scales = value.codes, value.scale
    size = codes.numel() // max(scales.numel(), 1)
    if codes.dtype != torch.uint8 or value.signed != signed:
        raise ValueError(f"{what}: got codes of {codes.dtype}, signed={value.signed}, expected uint8, signed={signed}")
    check_blocks(codes, scales, size, what)
    return of_map(codes, scales.float(), value.qmap, size, signed=signed)
