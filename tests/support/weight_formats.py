"""How weights narrower than float32 are kept: what tests of master weights and stochastic rounding share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.kernels.weights import join_weight
from shardopt.optim import ShardedOptimizer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Weights(NamedTuple):
    """The dtype of parameters, and the options that say how they are kept."""

    dtype: torch.dtype
    options: dict[str, Any]


FORMATS = {
    "bf16 24": Weights(BF16, {"master_weight_bits": 24}),
    "bf16 32": Weights(BF16, {"master_weight_bits": 32}),
    "bf16 stochastic": Weights(BF16, {"stochastic_rounding": True, "stochastic_rounding_seed": 7}),
    "fp16 24": Weights(FP16, {"master_weight_bits": 24}),
    "fp16 32": Weights(FP16, {"master_weight_bits": 32}),
}
ALL = {**FORMATS, "bf16": Weights(BF16, {}), "fp16": Weights(FP16, {}), "fp32": Weights(FP32, {})}
#: Low bits of a master weight, by ``master_weight_bits``.
LOW = {24: 8, 32: 16}


def integers(low_bits: Tensor, bits: int) -> Tensor:
    """Low bits as stored, one integer per weight."""
    return low_bits if bits == 24 else low_bits.view(torch.int16).squeeze(-1)


def master_weights(optimizer: ShardedOptimizer, param: Tensor) -> Tensor:
    """The float32 that parameter and low bits stand for."""
    (group,) = (g for g in optimizer.param_groups if any(p is param for p in g["params"]))
    bits = group["master_weight_bits"]
    return join_weight(param.detach(), integers(optimizer.state[param]["master_low_bits"], bits), LOW[bits])


def int_bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def every_mantissa(exponent: int) -> Tensor:
    """All positive floats of a biased exponent; 0: the subnormal ones and zero."""
    return (torch.arange(2**23, dtype=torch.int32) | exponent << 23).view(FP32)


def special_values() -> Tensor:
    """Ends, middle and both sides of ties of every exponent; NaN and infinity; all with both signs.

    Ties of both 16-bit floats, and of their words of 24 bits.
    """
    last_bits = [0, 1, 0xF, 0x10, 0x11, 0x30, 0x7F, 0x80, 0x81, 0x17F, 0x180, 0x181, 0xFFF, 0x1000, 0x1001, 0x3000]
    last_bits += [0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000]
    mantissas = last_bits + [0x7FFFFF - bits for bits in last_bits]
    magnitudes = torch.arange(256, dtype=torch.int32)[:, None] << 23 | torch.tensor(mantissas, dtype=torch.int32)
    positive = magnitudes.flatten().view(FP32)
    return torch.cat([positive, -positive])
