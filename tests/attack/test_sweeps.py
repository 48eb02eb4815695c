"""Attacks on the portable checkpoint, many at random: a few by default, all of them among the slow tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardopt
from versions import needs_async_save

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the attacks fork, and read /proc")

TESTS = Path(__file__).parents[1]
PATHS = [str(TESTS), str(TESTS / "support"), str(Path(shardopt.__file__).parents[1])]

#: Attacks by default, and in full.
COUNTS = {
    "hostile": (40, 1500),
    "race": (20, 2000),
    "pairs": (6, 116),
    "interrupts": (8, 160),
    "damage": (30, 1500),
    "kills": (6, 400),
}

NAMES = [pytest.param(name, marks=needs_async_save) if name in ("pairs", "kills") else name for name in COUNTS]


def sweep(name: str, count: int, seconds: float) -> None:
    """Runs a sweep in a process of its own, which has no threads when it forks."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "attack.sweep", name, "--count", str(count)]
    done = subprocess.run(
        command, cwd=PATHS[0], env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    print(done.stdout)
    faults = [line for line in done.stdout.splitlines() if line.startswith("FAULT")]
    told = "\n".join([*faults[:40], *done.stdout.splitlines()[-1:], done.stderr[-4000:]])
    assert done.returncode == 0, (
        f"{len(faults)} faults\nrepeat one as attack/sweep.py says: python -m attack.sweep {name} --seed ...\n{told}"
    )


@pytest.mark.parametrize("name", NAMES)
def test_sweep(name: str) -> None:
    sweep(name, COUNTS[name][0], seconds=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_sweep_in_full(name: str) -> None:
    sweep(name, COUNTS[name][1], seconds=7200)
