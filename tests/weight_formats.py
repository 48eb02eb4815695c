"""How weights narrower than float32 are kept: what the tests of master weights and stochastic rounding go through."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

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
