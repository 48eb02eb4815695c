"""How ranks divide a parameter among them: where each rank's elements lie, and how the ranks pass elements around."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardopt.layout.partition import Part
from shardopt.layout.rank_group import RankGroup


class Counted(NamedTuple):
    """The ranks that hold a parameter, for sums over several parameters, which count each part once.

    Attributes:
        ranks: all of them; None on a rank that is none of them.
        numbers: their numbers among all ranks of the job.
        before: the numbers of the ranks below this one, among these or not, that hold copies of this rank's part.
        reach: ``numbers``, and the ranks that are known to hold copies of the parameter.
    """

    ranks: RankGroup | None
    numbers: frozenset[int]
    before: frozenset[int]
    reach: frozenset[int]


class Division(NamedTuple):
    """How ranks divide a parameter.

    Attributes:
        ranks: the ranks that hold the parameter.
        parts: the rectangles of each rank, in the order of the ranks.
    """

    ranks: RankGroup
    parts: Sequence[list[Part]]

    @property
    def is_copied(self) -> bool:
        """Whether each rank holds the whole parameter."""
        return all(held == self.parts[0] for held in self.parts)


class Replicas(NamedTuple):
    """Ranks that hold the same parameter and gradient, and may share the work on it.

    Attributes:
        ranks: the ranks.
        size: the number of ranks.
    """

    ranks: RankGroup
    size: int
