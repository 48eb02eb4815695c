"""Every case of tests/gpu, dealt evenly over processes, each case written as it ends."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from gpu.common import BROKEN, FAKE, ROOT, Left, Report, context_is_broken


class Dealer:
    """A plugin of pytest: takes a share of the cases behind those that were run before, until the time is over."""

    def __init__(self, report: Report, left: Left, part: int, parts: int) -> None:
        self._report, self._left, self._part, self._parts = report, left, part, parts
        self._found: dict[str, Any] = report.found
        none = {"by function": {}, "failures": [], "done": 0, "passed": 0, "failed": 0, "skipped": 0}
        for key, value in none.items():
            self._found.setdefault(key, value)

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

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Notes which case begins: if the process dies in it, the next one goes on behind."""
        self._found["case"] = item.nodeid
        self._found["done"] += 1
        self._report.flush()
        yield
        self._found["case"] = ""
        if self._left() < 1:
            item.session.shouldstop = "no time left"

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


def tests(report: Report, left: Left, part: int, parts: int) -> None:
    """Runs this process's share of the cases."""
    torch.set_num_threads(1)
    marked = "not slow" if FAKE else "gpu or slow or not slow"
    options = f"-q -p no:cacheprovider -p no:xdist --rootdir {ROOT} -c {ROOT / 'pyproject.toml'}".split()
    pytest.main([*options, "-m", marked, str(ROOT / "tests" / "gpu")], plugins=[Dealer(report, left, part, parts)])
