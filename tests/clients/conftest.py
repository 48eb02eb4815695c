"""Ranks for frameworks that train with shardopt; a test is skipped with the name of the package that is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks.pool import Pool


@pytest.fixture(scope="session")
def client_ranks() -> Iterator[Pool]:
    """Ranks of their own: frameworks leave state in a process, and DeepSpeed replaces functions of torch."""
    pool = Pool()
    yield pool
    pool.close()
