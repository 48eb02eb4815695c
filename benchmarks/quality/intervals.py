"""Confidence intervals of a mean: Student's t and the bootstrap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Summary:
    """Mean of paired differences.

    Attributes:
        count: pairs.
        mean: of the differences.
        spread: standard deviation of one difference, from count - 1; NaN for one pair.
        t: the interval by Student's t; NaN for one pair.
        bootstrap: the percentile interval of 10,000 resamples.
    """

    count: int
    mean: float
    spread: float
    t: tuple[float, float]
    bootstrap: tuple[float, float]


def summary(values: Sequence[float]) -> Summary:
    """Summarizes differences, at least one.

    Raises:
        ValueError: there is none.
    """
    if not values:
        raise ValueError("values: got none, expected at least one")
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean())
    if len(x) == 1:
        return Summary(1, mean, math.nan, (math.nan, math.nan), (mean, mean))
    spread = float(x.std(ddof=1))
    half = t_quantile(len(x) - 1) * spread / math.sqrt(len(x))
    return Summary(len(x), mean, spread, (mean - half, mean + half), _bootstrap(x))


def t_quantile(degrees: int, level: float = LEVEL) -> float:
    """The t with P(|T| < t) = level, by bisection of the angle atan(t / sqrt(degrees)).

    Args:
        degrees: degrees of freedom, at least 1.
        level: in (0, 1).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < level else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _within(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) tan(angle)): Abramowitz & Stegun 26.7.3 and 26.7.4."""
    cosine, odd = math.cos(angle), degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    share = math.sin(angle) * total
    return 2 / math.pi * (angle + share) if odd else share


def _bootstrap(x: np.ndarray) -> tuple[float, float]:
    rows = np.random.default_rng(0).integers(0, len(x), size=(_RESAMPLES, len(x)))
    low, high = np.quantile(x[rows].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
