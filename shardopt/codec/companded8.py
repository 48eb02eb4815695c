"""companded8: the codes of FlashOptim (arXiv 2602.23349) with float32 scales and a floor under the second moment."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from shardopt.codec.base import Codec, int8_codes, random_codes, signed_lookup, units_in
from shardopt.kernels.numeric import divide, float32, fma, reciprocal, round_fma


class Companded8(Codec):
    name = "companded8"
    random = True

    @cached_property
    def table(self) -> Tensor:
        """Magnitudes ``y = t / (2 - t)`` by |code|; ``t = |code| / 127 = 2 y / (1 + y)``, and entry 128 repeats 127."""
        t = divide(torch.arange(129, dtype=torch.float32, device="cpu").clamp(max=127), 127)
        return t / (2 - t)

    def encode(self, x: Tensor, scales: Tensor, random: Tensor | None = None, *, signed: bool) -> Tensor:
        if signed:
            return int8_codes(x * units_in(254, scales), reciprocal(fma(x.abs(), units_in(1, scales), float32(1))))
        inverse = units_in(255, scales)
        q = round_fma(x, inverse) if random is None else random_codes(x, inverse, random)
        return torch.where(x > 0, q.clamp(min=1), q).to(torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        if signed:
            return signed_lookup(self.table, codes, scales)
        return codes.float() * (scales * divide(float32(1), 255))
