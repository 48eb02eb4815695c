"""Fixtures of the training job's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.pool import Pool
from train_job import CLEAR, run_on, write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def two_ranks(ranks: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run on 2 ranks of FSDP2, with checkpoints at steps 4 and 8."""
    output = tmp_path_factory.mktemp("two_ranks")
    run_on(ranks, 2, *CLEAR, "--data", text, "--output", output)
    return output
