"""Compares the runs of a task, seed by seed, with the float32 runs of the same seeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from quality.choices import Choice, choice_of, in_order
from quality.intervals import Summary, summary
from quality.records import Record

#: The goal: the upper limit of the difference, in %.
GOAL = 0.3
#: Pairs that a verdict needs: of fewer, t intervals hold only if differences are exactly normal.
LEAST_PAIRS = 5


@dataclass(frozen=True)
class Comparison:
    """An optimizer on a task, against the one that it is compared with.

    Attributes:
        name: of the optimizer.
        choice: its entry in the table of optimizers.
        difference: summary of the differences, in % of the loss that the baseline has with the same seed; None without
            pairs.
        loss: mean held-out loss of its finite runs; None without one.
        diverged: runs with a loss that is no finite number; they are in none of the figures above.
        runs: finite and diverged runs.
        state_bytes: per parameter that is trained.
    """

    name: str
    choice: Choice
    difference: Summary | None
    loss: float | None
    diverged: int
    runs: int
    state_bytes: float

    @property
    def verdict(self) -> str:
        """Whether the goal is reached, as far as the t interval shows."""
        if self.diverged:
            return "no"
        if self.difference is None or self.difference.count < LEAST_PAIRS:
            return "open"
        low, high = self.difference.t
        return "no" if low > GOAL else "yes" if high <= GOAL else "open"


def current(lines: Iterable[Record]) -> dict[str, dict[int, Record]]:
    """The runs of a task by optimizer and seed: those of the last definition of the task, and of each optimizer."""
    found = list(lines)
    if not found:
        return {}
    of_task = [line for line in found if line["digest"] == found[-1]["digest"]]
    latest = {line["optimizer"]: line["options"] for line in of_task}
    runs: dict[str, dict[int, Record]] = {}
    for line in of_task:
        if line["options"] == latest[line["optimizer"]]:
            runs.setdefault(line["optimizer"], {})[line["seed"]] = line
    return runs


def differences(runs: dict[int, Record], baseline: dict[int, Record]) -> list[float]:
    """Differences of the held-out losses in % of the baseline's, of the seeds where both are finite."""
    return [
        100 * (run["loss"] / baseline[seed]["loss"] - 1)
        for seed, run in sorted(runs.items())
        if run["finite"] and seed in baseline and baseline[seed]["finite"]
    ]


def compare(lines: Iterable[Record]) -> list[Comparison]:
    """A comparison per optimizer, in the order of the table of optimizers."""
    by_optimizer = current(lines)
    return [_comparison(name, by_optimizer) for name in in_order(by_optimizer)]


def _comparison(name: str, by_optimizer: dict[str, dict[int, Record]]) -> Comparison:
    choice, runs = choice_of(name), by_optimizer[name]
    pairs = [] if choice.baseline == name else differences(runs, by_optimizer.get(choice.baseline, {}))
    finite = [run for run in runs.values() if run["finite"]]
    some = next(iter(runs.values()))
    return Comparison(
        name,
        choice,
        summary(pairs) if pairs else None,
        fmean(run["loss"] for run in finite) if finite else None,
        len(runs) - len(finite),
        len(runs),
        some["state_bytes"],
    )
