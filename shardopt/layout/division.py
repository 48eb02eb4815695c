"""How ranks divide a parameter among them: where each rank's elements lie, and how the ranks pass elements around."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


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


class Exchange(Protocol):
    """Ranks that hold parts of the same rows, or of the same parameter, and their collectives.

    All of its ranks must call a collective. Along several dimensions of a mesh an exchange has several groups: it then
    reduces and gathers only.
    """

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replaces an int32 tensor by its elementwise maximum over the ranks."""

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replaces a float32, int32 or int64 tensor by its elementwise sum over the ranks."""

    @property
    def numbers_in_world(self) -> tuple[tuple[int, ...], ...]:
        """The global rank numbers of the members of each of its groups."""

    def gathered(self, message: bytes) -> dict[int, bytes]:
        """The ranks' messages by global rank number."""

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

    ranks: Exchange
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

    ranks: Exchange
    size: int
