"""Functions called in children of a warmed-up process, with limits of time and memory, and what came of them."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

#: Seconds of wall time after which a child counts as hung. The machine may be busy.
HUNG = 30.0
#: Seconds of CPU time and bytes of memory that a child may take.
CPU_SECONDS = 10.0
MEMORY_BYTES = 500 << 20


class Outcome(NamedTuple):
    """What came of one attack. A fault of the product, if ``fault``; named by ``kind`` in the summary."""

    kind: str
    fault: bool
    detail: str = ""
    attack: str = ""

    def __str__(self) -> str:
        return f"{'FAULT' if self.fault else 'ok'}: {self.kind} | {self.detail} | {self.attack}"


def ok(kind: str) -> Outcome:
    return Outcome(kind, False)


def fault(kind: str, detail: str = "") -> Outcome:
    return Outcome(kind, True, detail)


def call(function: Callable[[], Outcome], *, hung: float = HUNG) -> Outcome:
    """The outcome of a function, called in a child, which may die, hang, or take too much of something."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _child(function, write)
    os.close(write)
    try:
        answer = _read_all(read, hung)
        if answer is None:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(read)
        _, status, usage = os.wait4(child, 0)
    if answer is None:
        return fault("hung", f"{hung:.0f} s, of which {usage.ru_utime + usage.ru_stime:.1f} s of CPU time")
    if not answer:
        return fault(f"died with status {os.waitstatus_to_exitcode(status)}")
    return Outcome(*json.loads(answer))


def _child(function: Callable[[], Outcome], write: int) -> None:
    try:
        before, started = _memory("VmRSS"), time.process_time()
        try:
            outcome = function()
        except BaseException as error:
            outcome = fault(f"{type(error).__name__} in the attack itself", str(error))
        seconds, grown = time.process_time() - started, _memory("VmHWM") - before
        if seconds > CPU_SECONDS:
            outcome = fault("slow", f"{seconds:.1f} s of CPU time; {outcome}")
        if grown > MEMORY_BYTES:
            outcome = fault("large", f"{grown >> 20} MiB; {outcome}")
        os.write(write, json.dumps(outcome._replace(detail=outcome.detail[:2000])).encode())
    finally:
        os._exit(0)


def _memory(field: str) -> int:
    """Bytes of memory: VmRSS, in use now, or VmHWM, the most of this process so far."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _read_all(file: int, seconds: float) -> bytes | None:
    """All that comes from a pipe; None if it stays open."""
    found, end = b"", time.monotonic() + seconds
    while select.select([file], [], [], max(end - time.monotonic(), 0))[0]:
        data = os.read(file, 1 << 16)
        if not data:
            return found
        found += data
    return None


def summary(name: str, outcomes: Iterable[Outcome]) -> str:
    """One line: how many attacks came to what."""
    counts = Counter((outcome.fault, outcome.kind) for outcome in outcomes)
    parts = [f"{count} {'FAULT ' if bad else ''}{kind}" for (bad, kind), count in sorted(counts.items())]
    return f"{name}: {sum(counts.values())} attacks: {', '.join(parts)}"


def shown(value: Any) -> str:
    """A value in few characters."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "an int of many digits"
    return text if len(text) < 160 else f"{text[:150]}... ({len(text)} characters)"
