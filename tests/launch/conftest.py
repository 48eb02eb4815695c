"""Fixtures of the training job's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from train_job import write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text."""
    return write_text(tmp_path_factory.mktemp("text"))
