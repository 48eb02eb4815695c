"""SIGINT at a random moment of a save (even numbers) or a load (odd numbers): by the clock, or at a function's call.

Python handles a signal when it enters a function, among others, so that the latter are moments as good as any.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import sys
import threading
import time
from collections.abc import Hashable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from attack.contents import Known
from attack.forked import HUNG, Child, Outcome, Tell, fault, ok, shown
from attack.index_file import strays

_known: list[Known] = []
#: Seconds that a save and a load take, and Python functions that they call.
_seconds: list[float] = []
_calls: list[int] = []

#: Seconds within which threads have to end after the exception.
GRACE = 2.0


def prepare(base: Path) -> None:
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


def attack(seed: int, number: int, base: Path) -> Outcome:
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
    before = known.target.fingerprint()
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
    except KeyboardInterrupt:
        sys.setprofile(None)
    except BaseException as error:
        return fault(f"{what}: {type(error).__name__} surfaced", shown(str(error)))
    return _check(known, what, folder, before)


def _interrupt_at(call: int) -> None:
    """Sends SIGINT to this process when the main thread calls its so many-th function from now; never if it is 0."""
    calls = itertools.count(1)

    def entered(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and next(calls) == call:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    if call:
        sys.setprofile(entered)


def _check(known: Known, what: str, folder: Path, before: Hashable) -> Outcome:
    """Whether all is as it should be after an interrupted save or load."""
    if known.changed():
        return fault(f"{what}: the saved model or optimizer changed")
    if known.loaded() is None and known.target.difference(before):
        return fault(f"{what}: model and optimizer are half new")
    end = time.monotonic() + GRACE
    while len(threads := threading.enumerate()) > 1:
        if time.monotonic() > end:
            return fault(f"{what}: threads are alive", shown([thread.name for thread in threads]))
        time.sleep(0.01)
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
