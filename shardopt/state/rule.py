"""How an optimizer names its rule: the update that the kernels carry out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardopt import _C
from shardopt.codec import Moment
from shardopt.kernels.newton_schulz import NewtonSchulz

#: How a parameter is divided along its first dimension into matrices: their rows; "each", where every index there is a
#: matrix by itself; or None for one matrix of all.
Split = tuple[int, ...] | Literal["each"] | None


@dataclass(frozen=True)
class Orthogonalized:
    """How the directions of a rule are orthogonalized, and how the parameters move by the result.

    Attributes:
        newton_schulz: orthogonalizes a matrix.
        split: which matrices a parameter consists of.
        scale: a factor of the learning rate, given the shape of a matrix.
        memory: bytes that directions and what is computed of them may take on a device at a time.
        apply: the name of the rule that moves parameters by orthogonalized directions, which it reads as gradients.
    """

    newton_schulz: NewtonSchulz
    split: Split
    scale: Callable[[int, int], float]
    memory: int
    apply: str


@dataclass(frozen=True)
class Rule:
    """A rule of csrc/rules by name, with torch's names for its moments.

    Attributes:
        name: the rule's.
        moments: what it keeps.
        has_sums: False where it does without the sums over the parameter that csrc/rules declares, and without the pass
            that they take.
        orthogonalized: for a rule that writes directions where others write parameters, how they are orthogonalized;
            otherwise None.
    """

    name: str
    moments: tuple[Moment, ...]
    has_sums: bool = True
    orthogonalized: Orthogonalized | None = None

    def __post_init__(self) -> None:
        kinds, expected = tuple(moment.kind for moment in self.moments), _C.rules[self.name]["moments"]
        if kinds != expected:
            raise ValueError(
                f"rule {self.name!r}: got moments of the kinds {kinds}, expected {expected}, as csrc/rules has"
            )

    @property
    def sums(self) -> int:
        """How many sums over the parameter, or over all of them, a step needs."""
        return int(_C.rules[self.name]["sums"]) if self.has_sums else 0

    @property
    def shares_codes(self) -> bool:
        """Whether codecs may be used in which two moments share a code."""
        return bool(_C.rules[self.name]["shares_codes"])

    @property
    def totals(self) -> bool:
        """Whether the sums are over all parameters of the optimizer (``ShardedOptimizer.with_totals``)."""
        return bool(_C.rules[self.name]["totals"])


def hyper_row(rule: str, hyper: Mapping[str, float]) -> list[float]:
    """The hyper-parameters of the rule of that name in the kernels' order, filled up to the table's width."""
    row = [float(hyper[name]) for name in _C.rules[rule]["hyper"]]
    return row + [0.0] * (_C.max_hyper - len(row))
