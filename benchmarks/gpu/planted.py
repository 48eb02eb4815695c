"""Sections that fail on purpose, for tests of the flow."""

from __future__ import annotations

import os
import signal
import time

from gpu.common import BROKEN, Left, Report


def crash(report: Report, left: Left, part: int, parts: int) -> None:
    """Dies of a signal behind a finding."""
    report.put("before", 1)
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(report: Report, left: Left, part: int, parts: int) -> None:
    """Never ends."""
    report.put("before", 1)
    time.sleep(1000)


def broken(report: Report, left: Left, part: int, parts: int) -> None:
    """Ends as a section does whose CUDA context is broken."""
    report.put("before", 1)
    os._exit(BROKEN)


def raising(report: Report, left: Left, part: int, parts: int) -> None:
    """One of its parts raises, and the other does not."""
    report.attempt("first", left, 0, lambda: {}["missing"])
    report.attempt("second", left, 0, lambda: report.put("second", 1))
