"""Every case of tests/gpu, dealt evenly over processes, each case written as it ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.common import BROKEN, FAKE, ROOT, Left, Report


class Dealer:
    """A plugin of pytest: takes a share of the cases behind those that were run before, until the time is over."""

    def __init__(self, report: Report, left: Left, part: int, parts: int) -> None:
        self._report, self._left, self._part, self._parts = report, left, part, parts
        found = report.found
        self._found: dict[str, Any] = found
        found.setdefault("by function", {})
        found.setdefault("failures", [])
        found.setdefault("done", 0)
        for key in ("passed", "failed", "skipped"):
            found.setdefault(key, 0)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sorts the first case of each test before the second ones, large tests by some at a time."""
        functions: dict[str, list[pytest.Item]] = {}
        for item in items:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
        rounds = []
        for same in functions.values():
            at_once = max(len(same) // 40, 1)
            order = torch.randperm(len(same), generator=torch.Generator().manual_seed(0)).tolist()
            rounds += [(place // at_once, same[i]) for place, i in enumerate(order)]
        rounds.sort(key=lambda entry: entry[0])
        self._found["cases"] = len(rounds)
        items[:] = [item for _, item in rounds][self._part :: self._parts][self._found["done"] :]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Notes which case begins: if the process dies in it, the next one goes on behind."""
        self._found["case"] = nodeid
        self._found["done"] += 1
        self._report.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a case, and ends the process where it has broken the context."""
        if report.when == "call" or report.outcome != "passed":
            self._found[report.outcome] += 1
            function = report.nodeid.rpartition("/")[2].partition("[")[0]
            counts = self._found["by function"].setdefault(function, {})
            counts[report.outcome] = counts.get(report.outcome, 0) + 1
            counts["s"] = round(counts.get("s", 0) + report.duration, 2)
        if report.failed:
            self._found["failures"].append({"case": report.nodeid, "error": report.longreprtext[-1200:]})
            self._report.flush()
            if context_is_broken():
                os._exit(BROKEN)

    def pytest_runtest_logfinish(self) -> None:
        """Forgets the case that has ended."""
        self._found["case"] = ""

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Ends the session between cases when the time is over."""
        yield
        if self._left() < 1:
            item.session.shouldstop = "no time left"


def tests(report: Report, left: Left, part: int, parts: int) -> None:
    """Runs this process's share of the cases."""
    torch.set_num_threads(1)
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not slow" if FAKE else "gpu or slow or not slow",
        "--rootdir",
        str(ROOT),
    ]
    folder = Path(os.environ.get("GPU_FIRST_TESTS", ROOT / "tests" / "gpu"))
    pytest.main(
        [*options, "-c", str(ROOT / "pyproject.toml"), str(folder)], plugins=[Dealer(report, left, part, parts)]
    )


def context_is_broken() -> bool:
    """Whether no later call of CUDA can succeed."""
    if FAKE:
        return False
    try:
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").item()
    except RuntimeError:
        return True
    return False
