"""Runs a sweep of attacks: ``PYTHONPATH=tests python -m attack.sweep hostile --count 150``.

Each attack is one number under a seed, and can be repeated: ``--seed 0 --first 17 --count 1``. Prints one line per
fault, and a summary.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SWEEPS = {"hostile": "hostile"}


def sweep(name: str, seed: int, first: int, count: int, folder: Path) -> list[Any]:
    """The outcomes of so many attacks, each in a child of this process."""
    from attack.contents import threads_of_process

    module = importlib.import_module(f"attack.{SWEEPS[name]}")
    module.prepare(folder)
    assert threads_of_process() == 1, "a process with other threads cannot be forked safely"
    outcomes = []
    for number in range(first, first + count):
        outcome = module.attack(seed, number, folder)
        outcomes.append(outcome._replace(attack=f"--seed {seed} --first {number} --count 1: {outcome.attack}"))
        if outcome.fault:
            print(outcomes[-1], flush=True)
    return outcomes


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = sweep(args.sweep, args.seed, args.first, args.count, Path(folder))
    from attack.forked import summary

    print(f"{summary(args.sweep, outcomes)}; {time.monotonic() - started:.0f} s")
    return int(any(outcome.fault for outcome in outcomes))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
