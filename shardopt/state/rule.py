"""How an optimizer names its rule: the update that the kernels carry out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardopt import _C
from shardopt.codec import Moment


@dataclass(frozen=True)
class Rule:
    """A rule of csrc/rules by name, with torch's names for its moments."""

    name: str
    moments: tuple[Moment, ...]

    @property
    def index(self) -> int:
        """The rule's place in the kernels' list."""
        return int(_C.rules[self.name]["index"])

    def hyper_row(self, hyper: Mapping[str, float]) -> list[float]:
        """The hyper-parameters in the kernels' order, filled up to the table's width."""
        names = _C.rules[self.name]["hyper"]
        row = [float(hyper[name]) for name in names]
        return row + [0.0] * (_C.max_hyper - len(row))
