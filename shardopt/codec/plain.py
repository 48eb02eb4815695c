"""The codecs fp32 and bf16, which store moments as plain floats, without blocks and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from shardopt.codec.base import Codec, are_finite
from shardopt.kernels.numeric import bits, to_bf16


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
    """Moments rounded to nearest bfloat16, unsigned ones in a step at random; none above zero is rounded to zero."""

    name = "bf16"
    random = True
    code_dtype = torch.bfloat16

    def encode(self, x: Tensor, scales: Tensor, random: Tensor | None = None, *, signed: bool) -> Tensor:
        if signed:
            return to_bf16(x)
        if random is None:
            codes = to_bf16(x)
        else:  # the bfloat16 next below or above, above with the probability that makes the mean x
            words = ((bits(x).long() + (random >> 16)) >> 16).clamp(max=0x7FFF)
            codes = words.to(torch.int16).view(torch.bfloat16)
        smallest = torch.ones_like(codes, dtype=torch.int16).view(torch.bfloat16)
        return torch.where((codes == 0) & (x > 0), smallest, codes)

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        return codes.float()
