"""``kills``: SIGKILL in saves into one folder: by the clock, or at a call of the operating system.

Asynchronous saves copy to memory, or to a local disk on which files need names or not.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from attack.contents import Known
from attack.forked import Child, Outcome, Tell, call, fault, ok, shown
from attack.index_file import strays
from shardopt.checkpoint import CheckpointError

_known: list[Known] = []
#: Seconds that a save takes, and an asynchronous one.
_seconds: list[float] = []

#: Calls by which a save changes something on the disk: it is killed before or after one.
CALLS = (
    *("open", "close", "write", "pwrite", "writev", "pwritev", "fsync", "fdatasync", "sync", "sendfile", "truncate"),
    *("rename", "replace", "link", "symlink", "unlink", "remove", "rmdir", "mkdir", "ftruncate", "posix_fallocate"),
)


def prepare_kills(base: Path) -> None:
    """Makes two contents, and takes times."""
    (base / "staging").mkdir()
    _known.append(Known(2))
    for asynchronously in (False, True):
        _seconds.append(min(_timed(base, asynchronously) for _ in range(3)))


def _timed(base: Path, asynchronously: bool) -> float:
    def save(tell: Tell) -> None:
        started = time.monotonic()
        _known[-1].save(base / "timed", 0, asynchronously=asynchronously)
        tell(time.monotonic() - started)

    child = Child(save)
    child.end()
    return float(child.told[0])


def attack_kills(seed: int, number: int, base: Path) -> Outcome:
    """Kills a child that saves again and again; even numbers by ``save``, odd ones by ``async_save``."""
    rng = Random(f"kills {seed} {number}")
    known, folder, asynchronously = _known[-1], base / "checkpoint", number % 2 == 1
    if rng.random() < 0.15:
        shutil.rmtree(folder, ignore_errors=True)
    newest = _newest(known, folder)
    if not newest:  # what an earlier attack of this sweep left may be no checkpoint
        shutil.rmtree(folder, ignore_errors=True)
    calls = rng.randrange(1, 120) if rng.random() < 0.5 else 0
    before = rng.random() < 0.5
    delay = rng.uniform(0, 3 * _seconds[asynchronously])
    staging = rng.choice([None, base / "staging"])
    attack = f"{'async_save' if asynchronously else 'save'}, into {'a checkpoint' if newest else 'nothing'}, killed "
    attack += f"{'before' if before else 'after'} call {calls}" if calls else f"after {delay:.4f} s"
    attack += ", with copies on disk" if staging is not None and asynchronously else ""

    def save(tell: Tell) -> None:
        if calls:
            die_at(calls, before)
        turn = newest
        while True:
            turn += 1
            tell(turn)
            known.save(folder, turn % 2, asynchronously=asynchronously, staging=staging, turn=turn)
            tell(turn)

    child = Child(save)
    if child.wait_for(1) and not calls:
        time.sleep(delay)
        child.signal(signal.SIGKILL)
    status, _ = child.end()
    begun = max(child.told, default=newest)
    done = begun if child.told.count(begun) == 2 else begun - 1
    if status != -signal.SIGKILL:
        return fault("hung" if status is None else f"ended by itself, {status}")._replace(attack=attack)
    if os.listdir(base / "staging"):
        return fault("left on the local disk")._replace(attack=attack)
    outcome = call(lambda: _check_killed(known, folder, done, begun, base / "staging"))
    return outcome._replace(attack=f"{attack}, while {done} was saved and {begun} begun")


def _newest(known: Known, folder: Path) -> int:
    """The number of the save that a folder holds; 0 for none."""

    def find(tell: Tell) -> None:
        k, extra = known.load(folder)
        tell(extra["turn"] if k is not None else 0)

    child = Child(find)
    child.end()
    return child.told[0] if child.told else 0


def _check_killed(known: Known, folder: Path, done: int, begun: int, staging: Path) -> Outcome:
    """The newest save that was done, or the one begun; and another save is possible, which leaves nothing else."""
    kind = "new" if done < begun else "as reported"
    try:
        k, extra = known.load(folder)
    except CheckpointError as error:
        if done > 0:
            return fault("the checkpoint is lost", shown(str(error)))
        kind, extra = "none yet", {"turn": 0}
    except BaseException as error:
        return fault(f"load: {type(error).__name__}", shown(str(error)))
    else:
        if k is None:
            return fault("a mixture", shown(extra))
        if k != extra["turn"] % 2 or not done <= extra["turn"] <= begun:
            return fault("another save's content", f"{k}, {shown(extra)}, expected {done} to {begun}")
        kind = "old" if extra["turn"] < begun else kind
    try:
        turn = begun + 1
        known.save(folder, turn % 2, asynchronously=True, staging=staging, turn=turn)
        k, extra = known.load(folder)
    except BaseException as error:
        return fault(f"afterwards {type(error).__name__}", shown(str(error)))
    if k != turn % 2 or extra["turn"] != turn:
        return fault("the next save was another", shown(extra))
    left = strays(folder) + os.listdir(staging)
    return fault("strays", shown(left)) if left else ok(kind)


def die_at(calls: int, before: bool) -> None:
    """Kills this process at so many calls from now of functions that change the disk, in whatever thread."""
    count = iter(range(calls))

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            last = next(count, None) in (None, calls - 1)
            if last and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return called

    for name in filter(lambda name: hasattr(os, name), CALLS):
        setattr(os, name, dying(getattr(os, name)))
