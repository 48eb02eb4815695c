"""companded16: companded8 with 16-bit codes, for moments that 8 bits cannot hold, such as very slow averages."""

from __future__ import annotations

import torch
from torch import Tensor

from shardopt.codec.base import Codec, units_in
from shardopt.kernels.numeric import divide, float32, reciprocal, round_fma


class Companded16(Codec):
    name = "companded16"
    code_dtype = torch.int16
    least_root_scale = 2.0**-58

    def encode(self, x: Tensor, scales: Tensor, random: Tensor | None = None, *, signed: bool) -> Tensor:
        if signed:
            y = x * units_in(1, scales)
            return round_fma(65534 * y, reciprocal(y.abs() + 1)).to(torch.int16)
        q = round_fma(x, units_in(65535, scales))
        return torch.where(x > 0, q.clamp(min=1), q).int().to(torch.int16)

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        if signed:
            q = codes.float().clamp(min=-32767)
            return q * reciprocal(65534 - q.abs()) * scales
        return (codes.int() & 0xFFFF).float() * (scales * divide(float32(1), 65535))
