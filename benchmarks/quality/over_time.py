"""Differences of long runs over their steps, and the drift of their moments, at the marks of the runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from quality.choices import Choice, choice_of, in_order
from quality.compare import current
from quality.intervals import Summary, summary
from quality.records import Record

#: The share of the steps from which the rise is measured: warm-up is over, and the loss falls slowly.
RISE_FROM = 0.2


@dataclass(frozen=True)
class Course:
    """An optimizer's runs against the float32 runs of the same seeds, at each marked step that both reached.

    Attributes:
        name: of the optimizer.
        choice: its entry in the table of optimizers.
        differences: by step, of the held-out losses, in % of the baseline's.
        rise: of the difference of a seed, from a fifth of the steps to the last, in points of %; None where no pair
            has both.
        drift: by step, means over seeds of what `moments.drift` tells; a step without any is left out.
    """

    name: str
    choice: Choice
    differences: dict[int, Summary]
    rise: Summary | None
    drift: dict[int, dict[str, float]]


def courses(lines: Iterable[Record]) -> list[Course]:
    """A course per optimizer that has a pair with its float32 runs, in the order of the table of optimizers."""
    by_optimizer = current(lines)
    found = []
    for name in in_order(by_optimizer):
        choice = choice_of(name)
        if choice.baseline != name:
            course = _course(name, choice, by_optimizer[name], by_optimizer.get(choice.baseline, {}))
            if course.differences:
                found.append(course)
    return found


def _course(name: str, choice: Choice, runs: dict[int, Record], exact: dict[int, Record]) -> Course:
    of_seed = {seed: _paired(run, exact[seed]) for seed, run in sorted(runs.items()) if seed in exact}
    steps = sorted({step for pairs in of_seed.values() for step in pairs})
    differences = {step: summary([pairs[step] for pairs in of_seed.values() if step in pairs]) for step in steps}
    return Course(name, choice, differences, _rise(of_seed, runs), _drift(runs))


def _paired(run: Record, exact: Record) -> dict[int, float]:
    """Differences of two runs in %, by step."""
    yardstick = {mark["step"]: mark["loss"] for mark in exact.get("marks", ())}
    return {
        mark["step"]: 100 * (mark["loss"] / yardstick[mark["step"]] - 1)
        for mark in run.get("marks", ())
        if mark["loss"] is not None and yardstick.get(mark["step"]) is not None
    }


def _rise(of_seed: dict[int, dict[int, float]], runs: dict[int, Record]) -> Summary | None:
    grown = []
    for seed, pairs in of_seed.items():
        first, last = round(RISE_FROM * runs[seed]["steps"]), runs[seed]["steps"]
        if first in pairs and last in pairs:
            grown.append(pairs[last] - pairs[first])
    return summary(grown) if grown else None


def _drift(runs: dict[int, Record]) -> dict[int, dict[str, float]]:
    values: dict[int, dict[str, list[float]]] = {}
    for run in runs.values():
        for mark in run.get("marks", ()):
            for figure in mark.keys() - {"step", "loss"}:
                values.setdefault(mark["step"], {}).setdefault(figure, []).append(mark[figure])
    return {step: {figure: fmean(found) for figure, found in of.items()} for step, of in sorted(values.items())}
