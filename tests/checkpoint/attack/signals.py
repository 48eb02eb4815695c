"""Signals at random moments of saves and loads.

``interrupts``: SIGINT in a save (even numbers) or a load (odd numbers): by the clock, or at a function's call. Python
handles a signal when it enters a function, among others, so calls are moments as good as any. The folder stays whole; a
model that was being loaded has to be loaded again. ``kills``: SIGKILL in
saves into one folder: by the clock, or at a call of the operating system. Asynchronous saves copy to memory, or to a
local disk on which files need names or not.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from attack.contents import Known
from attack.forked import HUNG, Child, Outcome, Tell, call, fault, ok, shown
from attack.index_file import strays
from shardopt.checkpoint import CheckpointError

_known: list[Known] = []
#: Seconds that a save and a load take, and Python functions that they call.
_seconds: list[float] = []
_calls: list[int] = []


def prepare_interrupts(base: Path) -> None:
    """Makes two contents, and a checkpoint of each."""
    known = Known(2)
    _known.append(known)
    for k in range(2):
        known.save(base / f"{k}", k)
    for what in (lambda: known.save(base / "timed", 0), lambda: known.load(base / "timed")):
        what()
        started = time.monotonic()
        what()
        _seconds.append(time.monotonic() - started)
        calls = itertools.count()
        sys.setprofile(lambda frame, event, arg, calls=calls: next(calls) if event == "call" else None)
        what()
        sys.setprofile(None)
        _calls.append(next(calls))


def attack_interrupts(seed: int, number: int, base: Path) -> Outcome:
    """Interrupts a child that saves or loads again and again."""
    rng = Random(f"interrupts {seed} {number}")
    what = "load" if number % 2 else "save"
    folder = base / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base / "0", folder)
    delay, most = rng.uniform(0, 3 * _seconds[number % 2]), _calls[number % 2]
    at_call = rng.choice([0, rng.randint(1, most), rng.randint(most * 4 // 5, most)])
    child = Child(lambda tell: tell(_interrupted(_known[-1], what, folder, base, tell, at_call)))
    if child.wait_for(1) and not at_call:
        time.sleep(delay)
        child.signal(signal.SIGINT)
    status, _ = child.end()
    moment = f"at call {at_call} of {most}" if at_call else f"after {delay:.4f} s"
    outcome = Outcome(*child.told[1]) if len(child.told) == 2 else fault(f"{what} hung or died", f"status {status}")
    return outcome._replace(attack=f"{what}, interrupted {moment}")


def _interrupted(known: Known, what: str, folder: Path, base: Path, tell: Tell, at_call: int) -> Outcome:
    ignored: list[Any] = []
    sys.unraisablehook = lambda unraisable: ignored.append(unraisable.exc_value)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end, turn = time.monotonic() + HUNG / 2, 0
    try:
        tell("ready")
        _interrupt_at(at_call)
        while not ignored and time.monotonic() < end:
            turn += 1
            if what == "save":
                known.save(folder, turn % 2)
            else:
                known.load(base / f"{turn % 2}")
        if any(isinstance(error, KeyboardInterrupt) for error in ignored):
            return ok("ignored by Python itself, which was in a destructor")
        return fault(f"{what}: nothing surfaced")
    except BaseException as error:  # another error only where Python's own clean-up failed after the interrupt
        sys.setprofile(None)
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__context__, KeyboardInterrupt):
            return fault(f"{what}: {type(error).__name__} surfaced", shown(str(error)))
    return _check(known, what, folder)


def _interrupt_at(call: int) -> None:
    """Sends SIGINT to this process when the main thread calls its so many-th function from now; never if it is 0."""
    calls = itertools.count(1)

    def entered(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and next(calls) == call:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    if call:
        sys.setprofile(entered)


def _check(known: Known, what: str, folder: Path) -> Outcome:
    """Whether all is as it should be after an interrupted save or load."""
    if known.changed():
        return fault(f"{what}: the saved model or optimizer changed")
    try:
        k, extra = known.load(folder)
        if k is None:
            return fault(f"{what}: the folder holds no whole content", shown(extra))
        known.save(folder, 1 - k)
        after, extra = known.load(folder)
    except Exception as error:  # any error is judged: most kinds are faults
        return fault(f"{what}: afterwards {type(error).__name__}", shown(str(error)))
    if after != 1 - k:
        return fault(f"{what}: the next save was another", shown(extra))
    left = strays(folder)
    return fault(f"{what}: strays", shown(left)) if left else ok(f"{what} interrupted")


#: Seconds that a save takes, and an asynchronous one.
_kill_seconds: list[float] = []

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
        durations = []
        for _ in range(3):
            status = _timed(base, asynchronously)
            durations.append(status)
        _kill_seconds.append(min(durations))


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
    if isinstance(newest, Outcome):  # what an earlier attack of this sweep left
        shutil.rmtree(folder)
        newest = 0
    calls = rng.randrange(1, 120) if rng.random() < 0.5 else 0
    before = rng.random() < 0.5
    delay = rng.uniform(0, 3 * _kill_seconds[asynchronously])
    staging, has_names = rng.choice([None, base / "staging"]), rng.random() < 0.5
    attack = f"{'async_save' if asynchronously else 'save'}, into {'a checkpoint' if newest else 'nothing'}, killed "
    attack += f"{'before' if before else 'after'} call {calls}" if calls else f"after {delay:.4f} s"
    attack += f", {'named' if has_names else 'nameless'} copies" if staging is not None and asynchronously else ""

    def save(tell: Tell) -> None:
        if has_names:
            del os.O_TMPFILE
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
    if not has_names and os.listdir(base / "staging"):
        return fault("left on the local disk")._replace(attack=attack)
    outcome = call(lambda: _check_killed(known, folder, done, begun, base / "staging"))
    return outcome._replace(attack=f"{attack}, while {done} was saved and {begun} begun")


def _newest(known: Known, folder: Path) -> int | Outcome:
    """The number of the save that a folder holds; 0 for none."""
    if not folder.exists() or not os.listdir(folder):
        return 0
    numbers: list[int] = []

    def find(tell: Tell) -> None:
        k, extra = known.load(folder)
        tell(extra["turn"] if k is not None else None)

    child = Child(find)
    child.end()
    numbers = [turn for turn in child.told if turn is not None]
    return numbers[0] if numbers else fault("nothing")


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
        del os.O_TMPFILE
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

    for name in _existing(CALLS):
        setattr(os, name, dying(getattr(os, name)))


def _existing(names: Iterable[str]) -> list[str]:
    return [name for name in names if hasattr(os, name)]
