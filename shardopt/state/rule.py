"""How an optimizer names its rule: the update that the kernels carry out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardopt import _C
from shardopt.codec import Moment


@dataclass(frozen=True)
class Rule:
    """A rule of csrc/rules by name, with torch's names for its moments.

    Attributes:
        name: the rule's.
        moments: what it keeps.
        has_sums: False where it does without the sums over the parameter that csrc/rules declares, and without the pass
            that they take.
    """

    name: str
    moments: tuple[Moment, ...]
    has_sums: bool = True

    def __post_init__(self) -> None:
        kinds, expected = tuple(moment.kind for moment in self.moments), _C.rules[self.name]["moments"]
        if kinds != expected:
            raise ValueError(
                f"rule {self.name!r}: got moments of the kinds {kinds}, expected {expected}, as csrc/rules has"
            )

    @property
    def index(self) -> int:
        """The rule's place in the kernels' list."""
        return int(_C.rules[self.name]["index"])

    @property
    def sums(self) -> int:
        """How many sums over the parameter, or over all of them, a step needs."""
        return int(_C.rules[self.name]["sums"]) if self.has_sums else 0

    @property
    def totals(self) -> bool:
        """Whether the sums are over all parameters of the optimizer (``ShardedOptimizer.with_totals``)."""
        return bool(_C.rules[self.name]["totals"])

    def hyper_row(self, hyper: Mapping[str, float]) -> list[float]:
        """The hyper-parameters in the kernels' order, filled up to the table's width."""
        names = _C.rules[self.name]["hyper"]
        row = [float(hyper[name]) for name in names]
        return row + [0.0] * (_C.max_hyper - len(row))
