"""Describes update rules, such as Adam's, that the compiled kernels carry out, and the moments of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardopt import _C
from shardopt.codec import Moment
from shardopt.kernels.newton_schulz import NewtonSchulz

#: How a parameter is divided along its first dimension into matrices: the number of rows of each matrix; "each" if
#: every index of the dimension is a matrix; None if the whole parameter is one matrix.
Split = tuple[int, ...] | Literal["each"] | None


@dataclass(frozen=True)
class Orthogonalized:
    """How a rule such as Muon's orthogonalizes its update directions, and updates parameters by the result.

    Attributes:
        scale: returns the factor by which the learning rate is multiplied for a matrix, given its rows and columns.
        applied_rule: the name, in csrc/rules, of the rule that then updates parameters, given the orthogonalized
            directions in place of gradients.
        row_decay: decay rate of the second moments by which the rows of a result are normalized; None to leave rows as
            they are.
        memory: bytes that directions and intermediate results may take on a device, unless one parameter needs more.
    """

    newton_schulz: NewtonSchulz
    split: Split
    scale: Callable[[int, int], float]
    applied_rule: str
    row_decay: float | None = None
    memory: int = 512 << 20


@dataclass(frozen=True)
class Rule:
    """An update rule that csrc/rules implements, and the moments that it keeps, under torch's names.

    Attributes:
        name: the rule's name in csrc/rules.
        has_sums: False for a variant that skips the sums over the parameter that csrc/rules declares, and the extra
            pass that computes them.
        orthogonalized: how directions are orthogonalized, for a rule that writes directions where others write
            parameters; otherwise None.
        shared: with sums over all parameters, hyper-parameters that follow in each step from the first param group's
            values, alike for all groups. Steps then check no other values that ``hyper_from_totals`` has changed.
    """

    name: str
    moments: tuple[Moment, ...]
    has_sums: bool = True
    orthogonalized: Orthogonalized | None = None
    shared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kinds, expected = tuple(moment.kind for moment in self.moments), _C.rules[self.name]["moments"]
        if kinds != expected:
            raise ValueError(
                f"rule {self.name!r}: got moments of the kinds {kinds}, expected {expected}, as csrc/rules declares"
            )

    @property
    def sum_count(self) -> int:
        """The number of sums over the parameter, or over all parameters, that a step needs."""
        return int(_C.rules[self.name]["sums"]) if self.has_sums else 0

    @property
    def shares_codes(self) -> bool:
        """Whether codecs may be used in which two moments share a code."""
        return bool(_C.rules[self.name]["shares_codes"])

    @property
    def has_totals(self) -> bool:
        """Whether the sums are over all parameters of the optimizer (``ShardedOptimizer.hyper_from_totals``)."""
        return bool(_C.rules[self.name]["totals"])


def hyper_row(rule: str, hyper: Mapping[str, float]) -> list[float]:
    """A rule's hyper-parameters as a row of the kernels' table: in their order, padded with zeros to its width."""
    row = [float(hyper[name]) for name in _C.rules[rule]["hyper"]]
    return row + [0.0] * (_C.max_hyper - len(row))
