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
from typing import Any, NamedTuple, NoReturn

#: Seconds of wall time after which a child counts as hung. The machine may be busy.
HUNG = 60.0
#: Seconds of CPU time and bytes of memory that a child may take.
CPU_SECONDS = 10.0
MEMORY_BYTES = 500 << 20

Tell = Callable[[Any], None]


class Outcome(NamedTuple):
    """Result of one attack. A fault of the product, if ``fault``; named by ``kind`` in the summary."""

    kind: str
    fault: bool
    detail: str = ""
    attack: str = ""

    def __str__(self) -> str:
        return f"{'FAULT' if self.fault else 'ok'}: {self.kind} | {self.detail} | {self.attack}"


def ok(kind: str, detail: str = "") -> Outcome:
    return Outcome(kind, False, detail)


def fault(kind: str, detail: str = "") -> Outcome:
    return Outcome(kind, True, detail)


class Child:
    """A fork of this process that calls a function, and what the function tells.

    Args:
        function: called with a function that takes what to tell, which JSON can hold.
    """

    def __init__(self, function: Callable[[Tell], object]) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run(function, write)
        os.close(write)
        self._text = b""

    @property
    def told(self) -> list[Any]:
        """All that was told in full so far."""
        return [json.loads(line) for line in self._text.split(b"\n")[:-1]]

    def wait_for(self, count: int, seconds: float = HUNG) -> bool:
        """Waits until so much was told. False if it never is, or not in time."""
        end = time.monotonic() + seconds
        while self._text.count(b"\n") < count:
            if not select.select([self._read], [], [], max(end - time.monotonic(), 0))[0]:
                return False
            data = os.read(self._read, 1 << 16)
            if not data:
                return False
            self._text += data
        return True

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self, seconds: float = HUNG) -> tuple[int | None, float]:
        """Waits for the child's end.

        Returns the child's exit status (negative for a signal's, None if it hung) and its CPU time.
        """
        end = time.monotonic() + seconds
        while self.wait_for(self._text.count(b"\n") + 1, max(end - time.monotonic(), 0)):
            pass
        hung = bool(not select.select([self._read], [], [], 0)[0])
        if hung:
            self.signal(signal.SIGKILL)
        os.close(self._read)
        _, status, usage = os.wait4(self.pid, 0)
        return None if hung else os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def _run(function: Callable[[Tell], object], write: int) -> NoReturn:
    try:
        function(lambda value: os.write(write, json.dumps(value).encode() + b"\n"))
    finally:
        os._exit(0)


def call(function: Callable[[], Outcome]) -> Outcome:
    """The outcome of a function, called in a child, which may die, hang, or take too much of something."""
    child = Child(lambda tell: tell(_limited(function)))
    status, seconds = child.end()
    if status is None:
        return fault("hung", f"{HUNG:.0f} s, of which {seconds:.1f} s of CPU time")
    return Outcome(*child.told[0]) if child.told else fault(f"died with status {status}")


def _limited(function: Callable[[], Outcome]) -> Outcome:
    before, started = _memory("VmRSS"), time.process_time()
    most = _memory("VmSize") + 4 * MEMORY_BYTES  # so that reading what has no end takes no machine down
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        outcome = function()
    except BaseException as error:
        outcome = fault(f"{type(error).__name__} in the attack itself", str(error))
    seconds, grown = time.process_time() - started, _memory("VmHWM") - before
    if seconds > CPU_SECONDS:
        outcome = fault("slow", f"{seconds:.1f} s of CPU time; {outcome}")
    if grown > MEMORY_BYTES:
        outcome = fault("large", f"{grown >> 20} MiB; {outcome}")
    return outcome._replace(detail=outcome.detail[:2000])


def _memory(field: str) -> int:
    """Bytes of memory: VmRSS, in use now, VmHWM, the most of this process so far, or VmSize, of addresses."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))


def summary(name: str, outcomes: Iterable[Outcome]) -> str:
    """One line: how many attacks came to what."""
    counts = Counter((outcome.fault, outcome.kind) for outcome in outcomes)
    parts = [f"{count} {'FAULT ' if bad else ''}{kind}" for (bad, kind), count in sorted(counts.items())]
    return f"{name}: {sum(counts.values())} attacks: {', '.join(parts)}"


def shown(value: Any) -> str:
    """A value in few characters."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "an int of many digits"
    return text if len(text) < 160 else f"{text[:150]}... ({len(text)} characters)"
