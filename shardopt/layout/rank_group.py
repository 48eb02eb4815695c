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
    process groups, and supports all-reduce and :meth:`all_gather` only: the other members expect one process group.
    """

    @property
    @abstractmethod
    def global_ranks_by_group(self) -> tuple[tuple[int, ...], ...]:
        """The global rank numbers of the members of each process group."""

    @property
    @abstractmethod
    def global_rank(self) -> int:
        """This rank's number among all ranks of the job."""

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The global rank numbers of the members of the only process group; ValueError if there are several."""
        (global_ranks,) = self.global_ranks_by_group
        return global_ranks

    @property
    def rank(self) -> int:
        """This rank's index in the only process group."""
        return self.global_ranks.index(self.global_rank)

    @abstractmethod
    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replaces an int32 tensor by its elementwise maximum over the ranks."""

    @abstractmethod
    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replaces a float32, int32 or int64 tensor by its elementwise sum over the ranks."""

    @abstractmethod
    def to_group_device(self, tensor: Tensor) -> Tensor:
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
        """Starts an asynchronous broadcast of a contiguous tensor from the rank with index ``source`` in the group.

        Returns:
            A function that waits until the tensor has arrived.
        """

    @abstractmethod
    def all_gather(self, message: bytes) -> dict[int, bytes]:
        """All-gathers one message per rank, of any length: returns them by global rank, in the order of the ranks."""


class HoldersForSums(NamedTuple):
    """The ranks that hold a parameter: with them, sums over parameters (gradient norms) count each part only once.

    Of the ranks with copies of one part, only the lowest adds its part to a sum.

    Attributes:
        ranks: all ranks that hold the parameter; None on a rank that does not hold it.
        members: the global numbers of these ranks.
        lower_replicas: the ranks, inside ``ranks`` or not, that hold copies of this rank's part and have lower numbers.
        known_holders: ``members``, and other ranks that are known to hold copies of the parameter.
        store: torch.distributed's default ``Store``, for messages to ranks outside of ``known_holders``; None if all
            ranks are inside.
    """

    ranks: RankGroup | None
    members: frozenset[int]
    lower_replicas: frozenset[int]
    known_holders: frozenset[int]
    store: Any = None


def all_reduce_any(groups: Sequence[RankGroup], condition: bool) -> bool:
    """Whether a condition holds on any rank of some groups, or of any group that shares a rank with one of them.

    Collective: all of these ranks must call this.

    Args:
        groups: the groups that this rank belongs to.
        condition: this rank's value.
    """
    for group in (*groups, *groups):  # twice, as the first all-reduces miss what later groups report
        flag = torch.tensor([condition], dtype=torch.int32, device="cpu")
        group.all_reduce_max(flag)
        condition |= bool(flag.item())
    return condition


def all_or_none(groups: Sequence[RankGroup], work: Callable[[], T]) -> T:
    """Calls a function without collectives, and raises on all ranks of some groups if it raised on any of them.

    Collective: all ranks of the groups must call this. ``groups`` are those that this rank belongs to.

    Raises:
        ValueError: the function raised on another rank; says which, and its error. If the function raised on this
            rank, its own error is raised.
    """
    error: Exception | None = None
    message = b""
    try:
        result = work()
    except Exception as raised:  # any kind of error: other ranks must not wait for this rank
        error = raised
        rank = groups[0].global_rank if groups else 0
        message = f"on rank {rank}: {type(error).__name__}: {error}".encode(errors="replace")
    for group in groups:
        message = next(filter(None, group.all_gather(message).values()), b"")  # the first message that is not empty
    if error is not None:
        raise error
    if message:
        raise ValueError(
            f"expected state that all ranks can load, nothing was changed; got an error {message.decode()}"
        )
    return result


def reduce_together(all_reduce: Callable[[Tensor], None], tensors: Sequence[Tensor]) -> None:
    """All-reduces tensors of one dtype and device in place, concatenated so that one collective suffices."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    all_reduce(flat)
    for tensor, reduced in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(reduced.view_as(tensor))
