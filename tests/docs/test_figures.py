"""Figures are those that their scripts draw."""

from __future__ import annotations

import runpy
from pathlib import Path

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def test_memory() -> None:
    script = runpy.run_path(str(FIGURES / "make_memory.py"))
    remedy = "run python docs/figures/make_memory.py"
    assert script["draw"](script["bars"]()) == (FIGURES / "memory.svg").read_text(), remedy
