"""A process and its fork that both save asynchronously, with copies on one local disk, each into folders of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random
from typing import Any

import shardopt
from attack.contents import Known
from attack.forked import Child, Outcome, Tell, call, fault, ok, shown
from shardopt.checkpoint import saving as saving_module

_known: list[Known] = []

#: Saves of each process.
SAVES = 4


def prepare(base: Path) -> None:
    """Makes two contents for each process."""
    _known.append(Known(4))
    (base / "staging").mkdir()


def attack(seed: int, number: int, base: Path) -> Outcome:
    """Forks a process that saves: before its first save, between two, or while one is written."""
    rng = Random(f"forks {seed} {number}")
    forks_at, is_between = rng.randrange(SAVES), rng.random() < 0.5
    outcome = call(lambda: _parent(rng, base, forks_at, is_between))
    left = os.listdir(base / "staging")
    outcome = fault("left on the local disk", shown(left)) if left else outcome
    return outcome._replace(attack=f"forked {'before' if is_between else 'within'} save {forks_at}")


def _parent(rng: Random, base: Path, forks_at: int, is_between: bool) -> Outcome:
    child = None
    write = saving_module.write_data_file

    def write_later(*args: Any) -> Any:
        time.sleep(rng.uniform(0, 0.02))  # so that the other process copies meanwhile
        return write(*args)

    saving_module.write_data_file = write_later
    wrong: list[str] = []
    for turn in range(SAVES):
        if turn == forks_at and is_between:
            child = Child(lambda tell: _child(base, tell))
        saving = _saved(base, turn % 2, f"parent-{turn}")
        if turn == forks_at and not is_between:
            child = Child(lambda tell: _child(base, tell))
        saving.result()
        wrong += _wrong(base, turn % 2, f"parent-{turn}")
    assert child is not None
    status, _ = child.end()
    if not child.told:
        return fault("the fork hung or died", f"status {status}")
    wrong += child.told[0]
    return fault("other bits than were saved", shown(wrong)) if wrong else ok("both are exact")


def _child(base: Path, tell: Tell) -> None:
    wrong = []
    for turn in range(SAVES):
        saving = _saved(base, 2 + turn % 2, f"child-{turn}")  # the last one's memory is taken until this one is there
        saving.result()
        wrong += _wrong(base, 2 + turn % 2, f"child-{turn}")
    tell(wrong)


def _saved(base: Path, k: int, folder: str) -> Any:
    model, optimizer = _known[-1].contents[k]
    return shardopt.checkpoint.async_save(base / folder, model, optimizer, staging_dir=base / "staging", k=k)


def _wrong(base: Path, k: int, folder: str) -> list[str]:
    try:
        found, _ = _known[-1].load(base / folder)
    except Exception as error:  # any error is a fault here
        return [f"{folder}: {type(error).__name__}: {error}"]
    return [] if found == k else [f"{folder}: got {found}, expected {k}"]
