"""NorMuon (Li et al., 2025, arXiv 2510.05491): rows of an orthogonalized matrix divided by their root mean squares."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TINY = 1e-10  # by the authors: zeros stay zeros


def normalized(matrix: Tensor, row_moments: Tensor, decay: float) -> Tensor:
    """An orthogonalized matrix whose rows, the outputs' weights, are divided by the roots of their second moments.

    The result is rescaled to the norm of ``matrix``. All sums are of whole rows, in an order that depends on the
    matrix's shape alone.

    Args:
        matrix: bfloat16, of two dimensions.
        row_moments: float32, ``(rows,)``, an average of each row's mean square over the steps; updated.
        decay: decay rate of that average.

    Returns:
        float32, of the shape of ``matrix``.
    """
    norms = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32)
    new = row_moments.lerp(norms.square().div_(max(matrix.shape[1], 1)), 1.0 - decay)
    # An overflow, whose NaN no weight takes, would otherwise stay in the average for good.
    row_moments.copy_(torch.where(new < math.inf, new, row_moments))
    factors = row_moments.sqrt().add_(_TINY).reciprocal_()
    total, new_total = torch.linalg.vector_norm(norms), torch.linalg.vector_norm(norms * factors)
    return matrix * factors.mul_(total / new_total.add_(_TINY)).unsqueeze(1)
