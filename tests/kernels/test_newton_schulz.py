"""The Newton-Schulz iteration: singular values near 1, and nothing but the matrix counts.

That it has torch.optim.Muon's bits: tests/optim/test_muon_step.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from helpers import Shape, at_odd_offset
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.kernels.newton_schulz import POLAR_EXPRESS, QUINTIC, Coefficients, NewtonSchulz

QUINTIC_5 = (QUINTIC,) * 5
#: bfloat16 rounds by up to 2^-9 of each element: so far a matrix moves whose 32 singular values are about 1.
ROUNDING = 32**0.5 * 2.0**-9


def of(shape: Shape, seed: int = 0) -> Tensor:
    return values(shape, seed, torch.bfloat16)


@pytest.mark.parametrize(
    ("coefficients", "least", "largest"),
    [
        pytest.param(QUINTIC_5, 0.68, 1.21, id="quintic"),
        pytest.param(POLAR_EXPRESS[:5], 0.87, 1.13, id="polar express, 5 steps"),
        pytest.param(POLAR_EXPRESS, 1.0, 1.0, id="polar express"),
    ],
)
@pytest.mark.parametrize("shape", [(32, 32), (80, 32)], ids=str)
def test_singular_values(shape: Shape, coefficients: Sequence[Coefficients], least: float, largest: float) -> None:
    """The matrix's singular values go through the polynomial, and the singular vectors stay where they were."""
    generator = torch.Generator().manual_seed(sum(shape))
    u, v = (torch.linalg.qr(torch.randn(n, 32, generator=generator, dtype=torch.float64))[0] for n in shape)
    s = torch.logspace(0, -1.5, 32, dtype=torch.float64)
    matrix = (u * s) @ v.T
    result = NewtonSchulz(tuple(coefficients), 1e-7)(matrix.bfloat16().contiguous()).double()
    exact = s / s.norm()
    for a, b, c in coefficients:
        exact = a * exact + b * exact**3 + c * exact**5
    assert least - 1e-3 <= exact.min()
    assert exact.max() <= largest + 1e-3
    actual = torch.linalg.svdvals(result)
    assert least - ROUNDING <= actual.min()
    assert actual.max() <= largest + ROUNDING
    projected, expected = (result * matrix).sum(), (exact * s).sum()
    assert abs(projected - expected) <= 2.0**-7 * expected


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shape", [(150, 160), (1, 5000)], ids=str)
def test_threads_and_memory_change_nothing(shape: Shape) -> None:
    """Neither where the matrix lies, aligned or not, nor what was allocated before."""
    expected = {"o": NewtonSchulz(QUINTIC_5, 1e-7)(of(shape))}
    torch.set_num_threads(2)
    kept = []
    for offset in (0, 1, 3, 8, 100):
        kept.append(torch.empty(offset * 1000 + 7, dtype=torch.uint8))
        assert_same({"o": NewtonSchulz(QUINTIC_5, 1e-7)(at_odd_offset(of(shape), offset))}, expected)
