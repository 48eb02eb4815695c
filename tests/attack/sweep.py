"""Runs a sweep of attacks.

The command line is ``OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/support:. python -m attack.sweep hostile --count 150``.

Each attack is one number under a seed, and can be repeated: ``--seed 0 --first 17 --count 1``. Prints one line per
fault, and a summary.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attack.contents import threads_of_process
from attack.forked import Outcome, summary

SWEEPS = ("hostile", "race", "pairs", "interrupts", "damage", "kills")


def outcomes_of(name: str, seed: int, first: int, count: int, folder: Path) -> Iterator[Outcome]:
    """The outcomes of so many attacks, each in a child of this process."""
    module = importlib.import_module(f"attack.{name}")
    if hasattr(module, "attacks"):
        yield from module.attacks(seed, first, count, folder)
        return
    module.prepare(folder)
    assert threads_of_process() == 1, "a process with other threads cannot be forked safely"
    for number in range(first, first + count):
        outcome = module.attack(seed, number, folder)
        yield outcome._replace(attack=f"{name} --seed {seed} --first {number} --count 1: {outcome.attack}")


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    started = time.monotonic()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for outcome in outcomes_of(args.sweep, args.seed, args.first, args.count, Path(folder)):
            outcomes.append(outcome)
            if outcome.fault:
                print(outcome, flush=True)
    print(f"{summary(args.sweep, outcomes)}; {time.monotonic() - started:.0f} s")
    return int(any(outcome.fault for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
