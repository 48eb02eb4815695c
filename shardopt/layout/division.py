"""How ranks divide a parameter among them: where each rank's elements lie, and how the ranks pass elements around."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from torch import Tensor


class Region(NamedTuple):
    """Elements of a flattened parameter: the same columns of consecutive rows, or any range of elements, as one row.

    Where a row's columns are not next to each other, they are those of a tensor of more dimensions.

    Attributes:
        first: index of the first element in the flattened parameter.
        rows: how many rows.
        cols: elements of each, next to each other.
        stride: elements of the parameter from row to row.
        between: sizes and strides of dimensions between rows and columns.
    """

    first: int
    rows: int
    cols: int
    stride: int
    between: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the elements as a tensor."""
        return (self.rows, *(size for size, _ in self.between), self.cols)

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    def within(self, start: int, end: int) -> Region:
        """The part of the region among the elements ``[start, end)`` of the parameter: whole rows if it has several."""
        if self.rows == 1 and not self.between:
            first, last = max(self.first, start), min(self.first + self.cols, end)
            return Region(first, 1, max(last - first, 0), self.stride)
        row = self.first // self.stride
        first_row, last_row = max(row, start // self.stride), min(row + self.rows, end // self.stride)
        first = self.first + (first_row - row) * self.stride
        return self._replace(first=first, rows=max(last_row - first_row, 0))

    def of(self, whole: Tensor, start: int = 0) -> Tensor:
        """The region's elements in a contiguous tensor that begins with element ``start`` of the parameter: a view."""
        at = whole.storage_offset() + self.first - start
        return whole.as_strided(self.shape, (self.stride, *(stride for _, stride in self.between), 1), at)


class Exchange(Protocol):
    """How the ranks that hold parts of the same rows, or of the same parameter, agree on numbers."""

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replaces an int32 tensor by its elementwise maximum over those ranks. All of them must call it."""

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replaces a float32 or int64 tensor by its elementwise sum over those ranks. All of them must call it."""

    @property
    def numbers_in_world(self) -> tuple[tuple[int, ...], ...]:
        """The numbers among all ranks of those in each of its groups."""

    def gathered(self, message: bytes) -> dict[int, bytes]:
        """The messages of those ranks, by their numbers among all ranks. All of them must call it."""


class Ranks(Exchange, Protocol):
    """Ranks that pass elements of parameters around."""

    @property
    def rank(self) -> int:
        """This one's place among them."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Their numbers among all ranks of the job."""

    def within_reach(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy on a device whose tensors they can pass around."""

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Callable[[], object]:
        """Begins to send a part of ``sent`` to each rank. All of them must call it.

        Args:
            received: 1-D, for what the ranks send to this one, in their order.
            sent: 1-D, what this rank sends, in the order of the ranks.
            received_sizes: how much comes from each rank.
            sent_sizes: how much goes to each rank.

        Returns:
            Waits until ``received`` is there.
        """

    def broadcast(self, tensor: Tensor, source: int) -> Callable[[], object]:
        """Begins to send a contiguous tensor of one of the ranks to all. All of them must call it.

        Returns:
            Waits until it is there.
        """


class Division(NamedTuple):
    """How ranks divide a parameter.

    Attributes:
        ranks: those that hold its parts.
        regions: what each of them holds, in their order. They cover the parameter.
    """

    ranks: Ranks
    regions: tuple[Region, ...]

    @property
    def is_copied(self) -> bool:
        """Whether each rank holds all of it."""
        return all(region == self.regions[0] for region in self.regions)


class Copies(NamedTuple):
    """Ranks that hold the same parameter and gradient, and may share the work on it.

    Attributes:
        ranks: those ranks.
        size: how many they are.
    """

    ranks: Ranks
    size: int


def ranges(ends: Sequence[int]) -> Iterator[Region]:
    """The regions of ranks whose ranges of a parameter end at ``ends[1:]``; the first begins at ``ends[0]``."""
    for start, end in pairwise(ends):
        yield Region(start, 1, max(end - start, 0), max(end - start, 0))
