"""Two processes at one folder or one local disk.

``pairs``: both save into one folder at once, or one removes the other's folder. ``race``: one saves two contents
by turns, as fast as it can, and the other loads. ``forks``: a process and its fork save asynchronously, with copies on
one local disk, each into its own folders.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import shardopt
from attack.contents import Known
from attack.forked import HUNG, Child, Outcome, Tell, call, fault, ok, shown
from attack.index_file import strays
from shardopt.checkpoint import CheckpointError

_known: list[Known] = []


def prepare_pairs(base: Path) -> None:
    """Makes contents, and a checkpoint of the first."""
    _known.append(Known(4))
    _known[-1].save(base / "previous", 0)


def attack_pairs(seed: int, number: int, base: Path) -> Outcome:
    """Content 1 and content 2, into an empty folder or one with content 0; afterwards content 3.

    Or content 2 into the next folder, and older ones are removed.
    """
    rng = Random(f"pairs {seed} {number}")
    known, runs = _known[-1], base / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir()
    if number % 2:
        shutil.copytree(base / "previous", runs / "step-1")
    keep_last = rng.choice([None, None, 1])
    folder = runs / ("step-1" if keep_last is None else "step-2")
    start = time.monotonic() + 0.05
    delays = [rng.choice([0, rng.uniform(0, 0.03)]) for _ in range(2)]
    asynchronously = [rng.random() < 0.3 for _ in range(2)]
    detail = f"delays {delays}, async {asynchronously}, keep_last {keep_last}"

    def save(k: int, tell: Tell) -> None:
        time.sleep(max(start + delays[k - 1] - time.monotonic(), 0))
        into, kept = (runs / "step-1", None) if k == 1 else (folder, keep_last)
        try:
            known.save(into, k, asynchronously=asynchronously[k - 1], keep_last=kept)
        except BaseException as error:
            tell([type(error).__name__, str(error)])
        else:
            tell(["saved", ""])

    children = [Child(lambda tell, k=k: save(k, tell)) for k in (1, 2)]  # type: ignore[misc]
    ends = [child.end()[0] for child in children]
    if None in ends:
        return fault("a save hung", detail)
    said = [child.told[0] if child.told else ["died", str(end)] for child, end in zip(children, ends, strict=True)]
    if wrong := [(kind, shown(text)) for kind, text in said if kind not in ("saved", CheckpointError.__name__)]:
        return fault(f"save: {wrong[0][0]}", f"{wrong}, {detail}")
    saved = [k for k, (kind, _) in enumerate(said, start=1) if kind == "saved"]
    if not saved or (keep_last and len(saved) < 2):
        return fault("a save failed", f"{shown(said)}, {detail}")
    outcome = call(lambda: _check(known, folder, saved))
    return outcome._replace(detail=f"{outcome.detail}, saved {saved}, {detail}")


def _check(known: Known, folder: Path, saved: list[int]) -> Outcome:
    try:
        found = {path.name: known.load(path)[0] for path in folder.parent.iterdir()}
    except CheckpointError as error:
        return fault("a folder has no checkpoint", shown(str(error)))
    allowed = {"step-1": saved} if folder.name == "step-1" else {"step-1": [1], "step-2": [2]}
    if folder.name not in found or any(k not in allowed[name] for name, k in found.items()):
        return fault("other contents than those saved", f"{found}")
    known.save(folder, 3)
    if known.load(folder)[0] != 3:
        return fault("the next save is not what it was given")
    left = strays(folder)
    return fault("strays", shown(left)) if left else ok("both saved" if len(saved) == 2 else "one saved")


#: At most so many loads may give up, since the other process was too fast too often.
MAY_GIVE_UP = 0.01


def attacks_race(seed: int, first: int, count: int, base: Path) -> Iterator[Outcome]:
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


#: Saves of each process.
SAVES = 4


def prepare_forks(base: Path) -> None:
    """Makes two contents for each process."""
    _known.append(Known(4))
    (base / "staging").mkdir()


def attack_forks(seed: int, number: int, base: Path) -> Outcome:
    """Forks a process that saves: before its first save, between two, or while one is written."""
    rng = Random(f"forks {seed} {number}")
    forks_at, is_between = rng.randrange(SAVES), rng.random() < 0.5
    outcome = call(lambda: _parent(rng, base, forks_at, is_between))
    left = os.listdir(base / "staging")
    outcome = fault("left on the local disk", shown(left)) if left else outcome
    return outcome._replace(attack=f"forked {'before' if is_between else 'within'} save {forks_at}")


def _parent(rng: Random, base: Path, forks_at: int, is_between: bool) -> Outcome:
    children = []
    pwrite = os.pwrite

    def write_later(*args: Any) -> int:
        time.sleep(rng.uniform(0, 0.003))  # so that the other process copies meanwhile
        return pwrite(*args)

    def fork(turn: int, before: bool) -> None:
        if (turn, before) == (forks_at, is_between):
            children.append(Child(lambda tell: tell(_saves(base, "child", 2))))

    os.pwrite = write_later
    wrong = _saves(base, "parent", 0, fork)
    (child,) = children
    status, _ = child.end()
    if not child.told:
        return fault("the fork hung or died", f"status {status}")
    wrong += child.told[0]
    return fault("other bits than were saved", shown(wrong)) if wrong else ok("both are exact")


def _saves(base: Path, name: str, first: int, meanwhile: Callable[[int, bool], None] = lambda *args: None) -> list[str]:
    """Saves two contents by turns and loads each; returns what is wrong.

    The last save's memory is taken until the next one is there. ``meanwhile`` is called before each save, and within.
    """
    known, wrong = _known[-1], []
    for turn in range(SAVES):
        k, folder = first + turn % 2, base / f"{name}-{turn}"
        model, optimizer = known.contents[k]
        meanwhile(turn, True)
        saving = shardopt.checkpoint.async_save(folder, model, optimizer, staging_dir=base / "staging", k=k)
        meanwhile(turn, False)
        saving.result()
        try:
            found, _ = known.load(folder)
        except Exception as error:  # any error is a fault here
            wrong.append(f"{folder}: {type(error).__name__}: {error}")
        else:
            wrong += [] if found == k else [f"{folder}: got {found}, expected {k}"]
    return wrong
