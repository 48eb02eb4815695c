"""Where there is no GPU, one case of each test runs by default on the CPU in its place; all others are slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuda_device import CUDA


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests of this folder as gpu, or without one as slow."""
    seen = set()
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore:skipped .* gradient elements"))
        name = item.nodeid.partition("[")[0]
        if CUDA.type == "cuda":
            item.add_marker(pytest.mark.gpu)
        elif name in seen:
            item.add_marker(pytest.mark.slow)
        seen.add(name)
