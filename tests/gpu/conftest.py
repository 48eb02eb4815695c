"""Where there is no GPU, a few cases of each test run by default on the CPU in its place; all others are slow."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cuda_device import CUDA

FOLDER = Path(__file__).parent
#: Cases of a test that run by default.
CASES = 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests of this folder as gpu, or without one as slow."""
    seen: Counter[str] = Counter()
    for item in items:
        if item.path.parent != FOLDER:
            continue
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        if CUDA.type == "cuda":
            item.add_marker(pytest.mark.gpu)
        elif seen[name] > CASES:
            item.add_marker(pytest.mark.slow)
