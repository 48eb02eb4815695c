"""Loads from a folder into which another process saves two contents by turns, as fast as it can."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

from attack.contents import Known
from attack.forked import HUNG, Child, Outcome, Tell, fault, ok, shown
from shardopt.checkpoint import CheckpointError

#: At most so many loads may give up, since the other process was too fast too often.
MAY_GIVE_UP = 0.01


def attacks(seed: int, first: int, count: int, base: Path) -> Iterator[Outcome]:
    """The outcome of each load."""
    known = Known(2)
    folder = base / "checkpoint"
    known.save(folder, 0)

    def save(tell: Tell) -> None:
        tell("ready")
        turn = seed
        while True:
            turn += 1
            known.save(folder, turn % 2)
            tell("saved")

    def load(tell: Tell) -> None:
        for _ in range(first + count):
            tell(_load(known, folder))

    saver, loader = Child(save), Child(load)
    outcomes: list[Outcome] = []
    while loader.wait_for(len(outcomes) + 1):
        outcomes.append(Outcome(*loader.told[len(outcomes)]))
    saver.signal(signal.SIGKILL)
    status, _ = loader.end(seconds=1)
    saver.end()
    if len(outcomes) < first + count:
        outcomes.append(fault("the loader hung" if status is None else "the loader died", f"{HUNG} s, {status}"))
    saves = saver.told.count("saved")
    if saves < len(outcomes) / 20:
        outcomes.append(fault("hardly a save", f"{saves} beside {len(outcomes)} loads"))
    given_up = [outcome for outcome in outcomes if outcome.kind == "gave up"]
    many = len(given_up) > max(MAY_GIVE_UP * count, 1)
    for outcome in outcomes:
        yield outcome._replace(fault=True) if many and outcome in given_up else outcome


def _load(known: Known, folder: Path) -> Outcome:
    before = known.target.fingerprint()
    try:
        k, extra = known.load(folder)
    except CheckpointError as error:
        changed = known.target.difference(before)
        return fault("changed by a load that failed", changed) if changed else ok("gave up", shown(str(error)))
    except BaseException as error:
        return fault(f"load: {type(error).__name__}", shown(str(error)))
    if k is not None:
        return ok(f"content {k}")
    parts = [k for k in range(2) if not known.target.difference(known.prints[k])]
    return fault("a mixture", f"extra of {extra['k']}, model and optimizer of {parts or 'several'}")
