"""Runs sweeps of attacks, one after the other.

The command line is ``OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/support:. python -m attack.sweep hostile --count 150``.

With ``hostile=40 kills=6`` each sweep has a count of its own. Each attack is one number under a seed, and can be
repeated: ``--seed 0 --first 17 --count 1``. Prints one line per fault, and a summary per sweep.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attack.contents import has_one_thread
from attack.forked import HUNG, Outcome, fault, shown, summary

#: The module of each sweep. Of several in one module, the names of the functions end in the sweep's.
SWEEPS = {
    **{name: name for name in ("hostile", "damage", "releases", "cached_steps")},
    **dict.fromkeys(("race", "pairs", "forks"), "two_processes"),
    "kills": "signals",
    "submeshes": "submeshes",
}


def outcomes_of(name: str, seed: int, first: int, count: int, folder: Path) -> Iterator[Outcome]:
    """The outcomes of so many attacks, each in a child of this process or, with ``on_rank``, on several ranks."""
    module = importlib.import_module(f"attack.{SWEEPS[name]}")
    functions = (
        vars(module)
        if SWEEPS[name] == name
        else {key.removesuffix(f"_{name}"): value for key, value in vars(module).items() if key.endswith(f"_{name}")}
    )
    if "attacks" in functions:
        yield from functions["attacks"](seed, first, count, folder)
        return
    if "on_rank" in functions:
        yield from _on_ranks(name, functions, seed, range(first, first + count))
        return
    functions["prepare"](folder)
    assert has_one_thread(), "a process with other threads cannot be forked safely"
    for number in range(first, first + count):
        outcome = functions["attack"](seed, number, folder)
        yield outcome._replace(attack=f"{name} --seed {seed} --first {number} --count 1: {outcome.attack}")


def _on_ranks(name: str, functions: Mapping[str, Any], seed: int, numbers: Iterable[int]) -> Iterator[Outcome]:
    """The outcomes of attacks that a pool of ranks carries out."""
    from ranks.pool import Pool, RankFailure  # its threads must not be there when other sweeps fork

    pool = Pool()
    try:
        for number in numbers:
            attack = functions["Attack"].of(seed, number)
            try:
                outcome = functions["judged"](pool.run(attack.world_size, functions["on_rank"], attack, timeout=HUNG))
            except RankFailure as failure:
                outcome = fault("hung or died", shown(str(failure)[-400:]))
            yield outcome._replace(attack=f"{name} --seed {seed} --first {number} --count 1: {attack}")
    finally:
        pool.close()


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweeps", nargs="+", type=_sweep, metavar=f"{{{','.join(SWEEPS)}}}[=COUNT]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    faults = 0
    for name, count in args.sweeps:
        started = time.monotonic()
        outcomes = []
        with tempfile.TemporaryDirectory() as folder:
            for outcome in outcomes_of(name, args.seed, args.first, count or args.count, Path(folder)):
                outcomes.append(outcome)
                if outcome.fault:
                    print(outcome, flush=True)
        print(f"{summary(name, outcomes)}; {time.monotonic() - started:.0f} s", flush=True)
        faults += sum(outcome.fault for outcome in outcomes)
    return int(faults > 0)


def _sweep(text: str) -> tuple[str, int]:
    """The name of a sweep, and its count; 0 for the count of ``--count``."""
    name, _, count = text.partition("=")
    if name not in SWEEPS:
        raise argparse.ArgumentTypeError(f"got {name}, expected one of {', '.join(SWEEPS)}")
    return name, int(count or 0)


if __name__ == "__main__":
    sys.exit(main())
