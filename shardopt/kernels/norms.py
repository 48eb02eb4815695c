"""Passes over gradients: exact sums of squares, largest magnitudes, multiplication by a coefficient (csrc/norm)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import cpu_target


class NormCall:
    """Passes over the same gradients on the CPU.

    Args:
        entries: rows of ``_C.tensor_entry``, of which csrc/norm/norm.h names the columns that are used.
    """

    def __init__(self, entries: npt.NDArray[np.void]) -> None:
        self._entries = entries

    def run(self, norm_pass: _C.NormPass, rows: int, factor: Tensor | None = None) -> None:
        """Takes a pass.

        Args:
            norm_pass: which.
            rows: how many of the entries it takes, from the first on.
            factor: of the pass ``scale``: float32, 0-d.
        """
        by = 1.0 if factor is None else float(factor)
        _C.norm(self._entries[:rows], norm_pass, by, torch.get_num_threads(), cpu_target())


def root_of(words: Tensor) -> Tensor:
    """The root of an exact sum of squares, rounded once: float32, 0-d, on the sum's device.

    Args:
        words: int64, (``_C.sum_words``,).
    """
    return torch.tensor(_C.sum_root(words.numpy()), dtype=torch.float32)
