"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

# Before torch is imported, here and in the processes that tests start. Tests run side by side, and most tensors in them
# are small: with a thread per core in each process they take twice as long. Tests of several threads ask for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import shardopt  # noqa: F401  a source tree that is not built ends the session here, with one message
from programs import Programs
from ranks.pool import Pool
from versions import mend_training_on_the_cpu

mend_training_on_the_cpu()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Ranks to run distributed functions on: up to 4 processes on the CPU."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def deepspeed_ranks() -> Iterator[Pool]:
    """Ranks for DeepSpeed, which replaces functions of torch for good in each process where it is."""
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install 'shardopt[deepspeed]'")
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Runs programs in processes of their own that have imported torch."""
    with Programs() as server:
        yield server
