"""How ranks divide a parameter among them: where each rank's elements lie, and how the ranks pass elements around."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from shardopt.layout.rank_group import RankGroup


class Region(NamedTuple):
    """A rectangle of a parameter in its own shape, or flattened where ranks hold ranges of elements.

    Attributes:
        whole: the parameter's shape.
        starts: the rectangle's first index in each dimension.
        shape: the rectangle's shape.
    """

    whole: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> tuple[int, int]:
        """The index in the flattened parameter of the first element, and the one after the last element's."""
        strides = [math.prod(self.whole[dim + 1 :]) for dim in range(len(self.whole))]
        first = sum(start * stride for start, stride in zip(self.starts, strides, strict=True))
        return first, first + sum((size - 1) * stride for size, stride in zip(self.shape, strides, strict=True)) + 1

    def within(self, start: int, end: int) -> Region:
        """The region's elements among ``[start, end)`` of the parameter: whole rows if the region has several."""
        width = math.prod(self.whole[1:])
        first = max(self.starts[0], start // width)
        rows = max(min(self.starts[0] + self.shape[0], end // width) - first, 0)
        return self._replace(starts=(first, *self.starts[1:]), shape=(rows, *self.shape[1:]))

    def of(self, part: Tensor, start: int = 0) -> Tensor:
        """The region's elements in a contiguous tensor that begins with element ``start`` of the parameter: a view."""
        starts = (self.starts[0] - start // math.prod(self.whole[1:]), *self.starts[1:])
        inside = tuple(slice(at, at + size) for at, size in zip(starts, self.shape, strict=True))
        return part.view(-1, *self.whole[1:])[inside]


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
        ranks: the ranks that hold the parameter's parts.
        regions: the part of each rank, in the order of the ranks. Together the regions cover the parameter.
    """

    ranks: RankGroup
    regions: tuple[Region, ...]

    @property
    def is_copied(self) -> bool:
        """Whether each rank holds the whole parameter."""
        return all(region == self.regions[0] for region in self.regions)


class Replicas(NamedTuple):
    """Ranks that hold the same parameter and gradient, and may share the work on it.

    Attributes:
        ranks: the ranks.
        size: the number of ranks.
    """

    ranks: RankGroup
    size: int
