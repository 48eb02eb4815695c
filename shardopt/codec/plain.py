"""The codecs fp32 and bf16, which store moments as plain floats, without blocks and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from shardopt.codec.base import Codec, are_finite
from shardopt.kernels.numeric import to_bf16


class _Plain(Codec):
    """Base class of codecs whose codes are floats, and which have no scales."""

    root = False

    def is_sound(self, codes: Tensor, scales: Tensor, *, signed: bool) -> bool:
        return are_finite(codes, signed=signed)


class Float32(_Plain):
    """Stores float32 moments unchanged, so that unquantized state takes the same code path as quantized state."""

    name = "fp32"
    code_dtype = torch.float32

    def encode(self, x: Tensor, scales: Tensor, random: Tensor | None = None, *, signed: bool) -> Tensor:
        return x.clone()

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        return codes.clone()


class BFloat16(_Plain):
    """Moments rounded to nearest bfloat16; an unsigned moment above zero is never rounded to zero."""

    name = "bf16"
    code_dtype = torch.bfloat16

    def encode(self, x: Tensor, scales: Tensor, random: Tensor | None = None, *, signed: bool) -> Tensor:
        codes = to_bf16(x)
        if signed:
            return codes
        smallest = torch.ones_like(codes, dtype=torch.int16).view(torch.bfloat16)
        return torch.where((codes == 0) & (x > 0), smallest, codes)

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        return codes.float()
