"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks.pool import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Ranks to run distributed functions on: up to 4 processes on the CPU."""
    pool = Pool()
    yield pool
    pool.close()
