"""Attacks on the portable checkpoint and on released gradients: a few by default, many among the slow tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import shardopt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the attacks fork, and read /proc")

TESTS = Path(__file__).parents[2]
PATHS = [str(TESTS / "checkpoint"), str(TESTS / "support"), str(Path(shardopt.__file__).parents[1])]

#: Attacks by default, and in full.
COUNTS = {
    "hostile": (12, 1500),
    "race": (12, 2000),
    "pairs": (4, 160),
    "forks": (2, 100),
    "damage": (12, 1500),
    "kills": (4, 400),
    "releases": (5, 500),
    "cached_steps": (2, 550),
    "submeshes": (4, 400),  # last: its pool has threads
}


def run(sweeps: Mapping[str, int], seconds: float) -> dict[str, str]:
    """Runs sweeps in a process of their own, which has no threads when it forks; returns what each printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "attack.sweep", *(f"{name}={count}" for name, count in sweeps.items())]
    done = subprocess.run(
        command, cwd=PATHS[0], env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    lines, printed = done.stdout.splitlines(), {}
    for name in sweeps:
        end = next((i for i, line in enumerate(lines) if line.startswith(f"{name}: {sweeps[name]} attacks")), None)
        assert end is not None, f"got no summary of {name}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        printed[name], lines = "\n".join(lines[: end + 1]), lines[end + 1 :]
    assert done.returncode == int("FAULT" in done.stdout), done.stderr[-4000:]
    return printed


def assert_no_faults(printed: str) -> None:
    print(printed)
    faults = [line for line in printed.splitlines() if line.startswith("FAULT")]
    told = "\n".join([*faults[:40], printed.splitlines()[-1]])
    assert not faults, (
        f"{len(faults)} faults\nrepeat one as attack/sweep.py says: python -m attack.sweep NAME --seed ...\n{told}"
    )


@pytest.fixture(scope="module")
def few() -> dict[str, str]:
    """The output of a few attacks of each sweep, from one process: its start takes longer than they do."""
    return run({name: few for name, (few, _) in COUNTS.items()}, seconds=1200)


@pytest.mark.parametrize("name", COUNTS)
def test_sweep(few: dict[str, str], name: str) -> None:
    assert_no_faults(few[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_sweep_in_full(name: str) -> None:
    assert_no_faults(run({name: COUNTS[name][1]}, seconds=7200)[name])
