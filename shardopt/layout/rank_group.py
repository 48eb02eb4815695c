"""Groups of ranks: their collectives, and how they agree on success or failure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class MissingRanksError(RuntimeError):
    """Some ranks did not make a call that all ranks must make."""


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

        ``sent`` and ``received`` are 1-D, with as many elements for and from each rank as the sizes say, in the order
        of the ranks. Returns a function that waits until ``received`` is filled.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Callable[[], object]:
        """Starts a broadcast of a contiguous tensor from the rank with index ``source``; returns a wait for it."""

    @abstractmethod
    def all_gather(self, message: bytes) -> dict[int, bytes]:
        """All-gathers one message per rank, of any length: returns them by global rank, in the order of the ranks."""

    @abstractmethod
    def begin_meeting(self, call: str, ranks: tuple[int, ...], *, once: bool) -> Callable[[], None]:
        """Tells the other ranks of a process group, without a collective, that this rank makes a call.

        ``ranks`` are the global rank numbers of the group. With ``once`` they meet in their first such call only.
        Returns a function that waits until all ranks have come, and raises MissingRanksError if some do not come in
        time.
        """


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


def meet(groups: Iterable[RankGroup], call: str, *, once: bool = False) -> None:
    """Waits until all ranks of some groups have made this call, to be used before its collectives.

    Raises MissingRanksError if some do not come in time. With ``once`` ranks meet in their first such call only.
    """
    group_of = {ranks: group for group in groups for ranks in group.global_ranks_by_group}
    for wait in [group.begin_meeting(call, ranks, once=once) for ranks, group in group_of.items()]:
        wait()


def all_reduce_any(groups: Sequence[RankGroup], condition: bool) -> bool:
    """Whether a condition holds on any rank of some groups, or of any group that shares a rank with one of them.

    Collective: all of these ranks must call this. ``groups`` are those of this rank, ``condition`` is its value.
    """
    for group in (*groups, *groups):  # twice, as the first all-reduces miss what later groups report
        flag = torch.tensor([condition], dtype=torch.int32, device="cpu")
        group.all_reduce_max(flag)
        condition |= bool(flag.item())
    return condition


def all_or_none(groups: Sequence[RankGroup], work: Callable[[], T]) -> T:
    """Calls a function without collectives, and raises on all ranks of some groups if it raised on any of them.

    Collective: all ranks of the groups must call this. ``groups`` are those that this rank belongs to. Raises the
    function's own error, or a ValueError with the error of another rank and its number.
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
