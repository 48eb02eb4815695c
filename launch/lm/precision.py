"""Number formats of a run, by the values of the option precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """An entry of the table.

    Attributes:
        stored: dtype of the parameters.
        mixed: whether to compute in bfloat16 on float32 parameters.
        fp8: whether the linear layers of the blocks multiply in FP8.
    """

    stored: torch.dtype = torch.float32
    mixed: bool = False
    fp8: bool = False


PRECISIONS = {
    "fp32": Precision(),
    "bf16-mixed": Precision(mixed=True),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
    "fp8": Precision(mixed=True, fp8=True),
}
