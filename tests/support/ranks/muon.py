"""Muon on ranks: an optimizer of the small model, and which matrices a rank computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

import shardopt
from helpers import Shape, limited
from ranks.runs import SMALL
from shardopt.kernels.newton_schulz import NewtonSchulz
from shardopt.optim import ShardedOptimizer

#: The matrices of the small model, and how many there are of each shape.
MATRICES: Counter[Shape] = Counter([(192, 66), (66, 192), (70, 198), (1, 70)])


def of_groups(model: nn.Module, memory: int | None = None, **options: Any) -> ShardedOptimizer:
    """Muon with the groups of :func:`shardopt.muon_groups`, in waves of so much memory."""
    return limited(shardopt.Muon8bit(shardopt.muon_groups(model), **{**SMALL, **options}), memory)


@contextmanager
def orthogonalized() -> Iterator[list[Shape]]:
    """The shapes of the matrices that this rank computes inside."""
    found: list[Shape] = []
    original = NewtonSchulz.__call__

    def call(newton_schulz: NewtonSchulz, matrix: Tensor) -> Tensor:
        found.append(tuple(matrix.shape))
        return original(newton_schulz, matrix)

    with patch.object(NewtonSchulz, "__call__", call):
        yield found
