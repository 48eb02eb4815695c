"""Marks cases of parametrized tests that are not run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(cases: Iterable[tuple[Any, ...]], besides: Iterable[tuple[Any, ...]] = ()) -> list[Any]:
    """Cases of ``pytest.mark.parametrize`` that only ``--all`` runs: those given, without those listed ``besides``."""
    fast = list(besides)
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases if case not in fast]
