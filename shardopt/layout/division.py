"""How ranks divide a parameter among them: where each rank's elements lie, and how the ranks pass elements around."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from torch import Tensor


class Region(NamedTuple):
    """Elements of a flattened parameter: the same columns of consecutive rows, or any range of elements, as one row.

    A row's columns that are not adjacent are several runs, described by dimensions between rows and columns.

    Attributes:
        first: index of the first element in the flattened parameter.
        rows: how many rows.
        cols: adjacent elements of a run.
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
        """Shape of the elements as a tensor."""
        return (self.rows, *(size for size, _ in self.between), self.cols)

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    def within(self, start: int, end: int) -> Region:
        """The region's elements among ``[start, end)`` of the parameter: whole rows if the region has several."""
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
    """Ranks that hold parts of the same rows, or of the same parameter, and their collectives.

    All of its ranks must call a collective.
    """

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replaces an int32 tensor by its elementwise maximum over the ranks."""

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replaces a float32 or int64 tensor by its elementwise sum over the ranks."""

    @property
    def numbers_in_world(self) -> tuple[tuple[int, ...], ...]:
        """The global rank numbers of the members of each of its groups."""

    def gathered(self, message: bytes) -> dict[int, bytes]:
        """The ranks' messages by global rank number."""


class Ranks(Exchange, Protocol):
    """Ranks that pass elements of parameters around."""

    @property
    def rank(self) -> int:
        """This rank's place among the ranks."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ranks' numbers among all ranks of the job."""

    def within_reach(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy on a device whose tensors the ranks can pass around."""

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Callable[[], object]:
        """Begins to send a part of ``sent`` to each rank. All ranks must call this.

        Args:
            received: 1-D, filled with the elements from all ranks, in the order of the ranks.
            sent: 1-D, elements for all ranks, in the order of the ranks.
            received_sizes: number of elements from each rank.
            sent_sizes: number of elements for each rank.

        Returns:
            A function that waits until ``received`` is filled.
        """

    def broadcast(self, tensor: Tensor, source: int) -> Callable[[], object]:
        """Begins to send a contiguous tensor of the rank ``source`` to all. All ranks must call this.

        Returns:
            A function that waits until the tensor has arrived.
        """


class Notes(Protocol):
    """Messages from some ranks to ranks that have no group with them. Messages about one subject are numbered."""

    def write(self, subject: str, message: bytes) -> None:
        """Sends the ranks' next message, without waiting for a reader. All of the ranks call this."""

    def read(self, subject: str) -> bytes:
        """Waits for the next message of the ranks, of which this rank is none."""

    def skip(self, subject: str) -> None:
        """Leaves the next message out."""


class Counted(NamedTuple):
    """The ranks that hold a parameter, for sums over several parameters, which count each part once.

    Attributes:
        ranks: all of them; None on a rank that is none of them.
        numbers: their numbers among all ranks of the job.
        before: the numbers of the ranks below this one, among these or not, that hold copies of this rank's part.
        reach: ``numbers``, and the ranks that are known to hold copies of the parameter.
        notes: messages through the store, for ranks that hold no element of the parameter and are in no group of these
            ranks. None if there are no such ranks.
    """

    ranks: Exchange | None
    numbers: frozenset[int]
    before: frozenset[int]
    reach: frozenset[int]
    notes: Notes | None = None


class Division(NamedTuple):
    """How ranks divide a parameter.

    Attributes:
        ranks: the ranks that hold the parameter's parts.
        regions: the part of each rank, in the order of the ranks. Together the regions cover the parameter.
    """

    ranks: Ranks
    regions: tuple[Region, ...]

    @property
    def is_copied(self) -> bool:
        """Whether each rank holds the whole parameter."""
        return all(region == self.regions[0] for region in self.regions)


class Copies(NamedTuple):
    """Ranks that hold the same parameter and gradient, and may share the work on it.

    Attributes:
        ranks: the ranks.
        size: the number of ranks.
    """

    ranks: Ranks
    size: int


def ranges(ends: Sequence[int]) -> Iterator[Region]:
    """The regions of ranks whose ranges of a parameter end at ``ends[1:]``; the first begins at ``ends[0]``."""
    for start, end in pairwise(ends):
        yield Region(start, 1, max(end - start, 0), max(end - start, 0))
