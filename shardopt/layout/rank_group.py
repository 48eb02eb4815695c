"""Groups of ranks: their collectives, and how they agree on success or failure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class RankGroup(ABC):
    """Ranks that run collectives together: holders of one row or parameter, or ranks that save one checkpoint.

    All ranks of the group must call each collective. A group along several dimensions of a mesh consists of several
    process groups, and supports all-reduce and :meth:`gathered` only.
    """

    @property
    @abstractmethod
    def numbers_in_world(self) -> tuple[tuple[int, ...], ...]:
        """The global rank numbers of the members of each process group."""

    @property
    @abstractmethod
    def number(self) -> int:
        """This rank's number among all ranks of the job."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The global rank numbers of the members of the only process group."""
        (only,) = self.numbers_in_world
        return only

    @property
    def rank(self) -> int:
        """This rank's place in the only process group."""
        return self.numbers.index(self.number)

    @abstractmethod
    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replaces an int32 tensor by its elementwise maximum over the ranks."""

    @abstractmethod
    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replaces a float32, int32 or int64 tensor by its elementwise sum over the ranks."""

    @abstractmethod
    def within_reach(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy on a device from which the group's back end can send (NCCL: a GPU)."""

    @abstractmethod
    def all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Callable[[], object]:
        """Starts an asynchronous all-to-all: this rank sends a part of ``sent`` to each rank of the group.

        Args:
            received: 1-D, filled with the elements from all ranks, in the order of the ranks.
            sent: 1-D, elements for all ranks, in the order of the ranks.
            received_sizes: number of elements from each rank.
            sent_sizes: number of elements for each rank.

        Returns:
            A function that waits until ``received`` is filled.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Callable[[], object]:
        """Starts an asynchronous broadcast of a contiguous tensor from the rank at place ``source`` of the group.

        Returns:
            A function that waits until the tensor has arrived.
        """

    @abstractmethod
    def gathered(self, message: bytes) -> dict[int, bytes]:
        """All-gathers one message per rank: the messages by global rank number, in the order of the ranks."""


class Counted(NamedTuple):
    """The ranks that hold a parameter: with them, sums over parameters (gradient norms) count each part only once.

    Attributes:
        ranks: all ranks that hold the parameter; None on a rank that does not hold it.
        numbers: the global numbers of these ranks.
        before: the ranks, inside ``ranks`` or not, that hold copies of this rank's part and have lower numbers.
        reach: ``numbers``, and the ranks that are known to hold copies of the parameter.
        store: torch.distributed's default ``Store``, for messages to ranks that are not in ``reach``; None if all are.
    """

    ranks: RankGroup | None
    numbers: frozenset[int]
    before: frozenset[int]
    reach: frozenset[int]
    store: Any = None


def on_any_rank(groups: Sequence[RankGroup], here: bool) -> bool:
    """Whether a condition holds on any rank of some groups, or of any group that shares a rank with one of them.

    All of these ranks must call this.

    Args:
        groups: the groups that this rank belongs to.
        here: whether the condition holds on this rank.
    """
    for group in (*groups, *groups):
        flag = torch.tensor([here], dtype=torch.int32, device="cpu")
        group.all_reduce_max(flag)
        here |= bool(flag.item())
    return here


def all_or_none(groups: Sequence[RankGroup], work: Callable[[], T]) -> T:
    """Calls a function without collectives, and raises on all ranks of some groups if it raised on any of them.

    Args:
        groups: the groups that this rank belongs to.
        work: the function.

    Raises:
        ValueError: the function raised on another rank; says which, and its error. If the function raised on this
            rank, its own error is raised.
    """
    error: Exception | None = None
    said = b""
    try:
        result = work()
    except Exception as raised:  # any kind of error: other ranks must not wait for this rank
        error = raised
        said = f"on rank {groups[0].number if groups else 0}: {type(error).__name__}: {error}".encode(errors="replace")
    for group in groups:
        said = next(filter(None, group.gathered(said).values()), b"")
    if error is not None:
        raise error
    if said:
        raise ValueError(f"expected state that all ranks can load, nothing was changed; got an error {said.decode()}")
    return result


def reduce_together(all_reduce: Callable[[Tensor], None], tensors: Sequence[Tensor]) -> None:
    """All-reduces tensors of one dtype and device in place, concatenated so that one collective suffices."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    all_reduce(flat)
    for tensor, new in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(new.view_as(tensor))
