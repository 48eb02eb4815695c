"""fp32 and bf16: moments as floats, without blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from shardopt.codec.base import Codec


class Float32(Codec):
    """The exact 32-bit optimizer through the same code path."""

    name = "fp32"
    code_dtype = torch.float32
    root = False

    def encode(self, x: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        return x.clone()

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        return codes.clone()


class BFloat16(Codec):
    """Moments rounded to nearest bfloat16, an unsigned one never down to zero."""

    name = "bf16"
    code_dtype = torch.bfloat16
    root = False

    def encode(self, x: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        codes = x.bfloat16()
        if signed:
            return codes
        smallest = torch.ones_like(codes, dtype=torch.int16).view(torch.bfloat16)
        return torch.where((codes == 0) & (x > 0), smallest, codes)

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        return codes.float()
