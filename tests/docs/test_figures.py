"""Figures are those that their scripts draw, and show what the pages say of them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
SCRIPTS = sorted(FIGURES.glob("make_*.py"))


@pytest.fixture(autouse=True)
def _next_to_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIGURES))


def run(script: Path) -> dict[str, Any]:
    return runpy.run_path(str(script))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem.removeprefix("make_"))
def test_figures(script: Path) -> None:
    found = run(script)
    assert found["figure"]() == found["TARGET"].read_text(), f"run python docs/figures/{script.name}"


def test_codec_errors() -> None:
    """The errors that docs/codecs.md names are those of the codecs."""
    updates = {name: dict(curves[1]) for name, curves in run(FIGURES / "make_codec_error.py")["measure"]().items()}
    assert max(updates["log8"].values()) < 0.02
    assert max(updates["bf16"].values()) < 0.002
    beyond = {"companded8": -2.5, "log4": -3.5, "dynamic8": -4.5}  # decimal logarithms
    for name, least in beyond.items():
        assert all(0.9 < error <= 1 for x, error in updates[name].items() if x < least)
    close = [x for x in updates["log8"] if x > -0.3]
    assert all(updates["companded8"][x] < updates["log8"][x] for x in close)
