"""Fixtures of the tests that need ranks of their own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from ranks.pool import Pool


@pytest.fixture(scope="session")
def deepspeed_ranks() -> Iterator[Pool]:
    """Ranks for DeepSpeed, which replaces functions of torch for good in each process where it is."""
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install 'shardopt[deepspeed]'")
    pool = Pool()
    yield pool
    pool.close()
