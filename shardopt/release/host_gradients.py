"""Gradients on the host: copied from the device in pieces, summed over micro-batches, and their squares summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.norms import accumulate_norm
from shardopt.layout import HoldersForSums
from shardopt.state import residency


class HostGradient:
    """The sum, on the host, of one parameter's gradients over the micro-batches of a step.

    Args:
        name: the parameter's name, for error messages.
        place: host memory for the gradient of this rank's shard.
        holders: the ranks that hold the parameter's shards, over which the norm is summed.

    Attributes:
        sum: the sum of the gradients so far, contiguous.
        count: how many gradients were added to the sum, or are in flight to it.
        squares: the exact sum of the squares of ``sum``'s elements; None if it is not computed, or out of date.
        is_lost: whether a copy raised an exception, so that ``sum`` is incomplete.
        arrival: a future that is done once the last copy has read its gradient, whose memory may then be reused.
    """

    def __init__(self, name: str, place: Tensor, holders: HoldersForSums | None) -> None:
        self.name, self.holders, self.sum = name, holders, place
        self.count = 0
        self.squares: Tensor | None = None
        self.is_lost = False
        self.arrival: Future[None] | None = None

    def take(self, gradient: Tensor, staging: Staging, *, first: bool, squares: Tensor | None) -> None:
        """Copies a gradient to the host and adds it to the sum; runs in the worker thread.

        Args:
            gradient: contiguous, on the parameter's device.
            staging: copies the gradient in pieces.
            first: whether this is the step's first gradient, which overwrites the sum.
            squares: zeros, to which the squares of the new sum are added exactly; None to leave them out.
        """
        try:
            total = self.sum.view(-1)
            is_direct = first and gradient.dtype == total.dtype
            for place, piece in staging.arriving(gradient.view(-1), total, is_direct=is_direct):
                if not is_direct:
                    place.copy_(piece) if first else place.add_(piece)  # in float32, where it is the sum's dtype
                if squares is not None:
                    accumulate_norm(place, _C.NormPass.squares, squares)
            self.squares = squares
        except BaseException:
            self.is_lost = True
            raise

    def share(self, *, largest: bool) -> Tensor:
        """The exact sum of squares, or the bits of the largest magnitude. No copy to the sum may be in flight."""
        if not largest and self.squares is not None:
            return self.squares
        share = no_share()
        accumulate_norm(self.sum.view(-1), _C.NormPass.largest if largest else _C.NormPass.squares, share)
        if not largest:
            self.squares = share
        return share

    def step(self, take: Callable[[], None]) -> None:
        """Calls ``take``, which steps the parameter, unless a copy to the sum has failed; runs in the worker thread."""
        self.demand_arrival()
        take()

    def demand_arrival(self) -> None:
        """Checks that no copy that has ended so far has failed.

        Raises:
            RuntimeError: a copy raised an exception, so that the sum is incomplete.
        """
        if self.is_lost:
            raise RuntimeError(
                f"{self.name}: got a gradient that did not arrive in the host's memory, as its copy raised an "
                "exception, expected a whole one; call optimizer.zero_grad() and backward() again"
            )


class Staging:
    """Copies gradients to the host, one at a time: into the sum's memory, or through two buffers to be added to it.

    Args:
        pin: whether the buffers are pinned memory, as for gradients on a GPU.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._slots: list[Tensor] = []

    def arriving(self, gradient: Tensor, total: Tensor, *, is_direct: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Gives each piece of the sum with the gradient's piece on the host, while the next piece is being copied.

        Args:
            gradient: 1-D, on any device.
            total: the sum, 1-D, of the same number of elements.
            is_direct: whether to copy straight into the sum; otherwise into one of two buffers, which are reused.
        """
        numel = residency.CHUNK_BYTES // total.itemsize
        pieces = zip(torch.split(total, numel), torch.split(gradient, numel), strict=True)
        before: tuple[Tensor, Tensor, torch.cuda.Event | None] | None = None
        for index, (place, source) in enumerate(pieces):
            target = place if is_direct else self._slot(index % 2).view(source.dtype)[: source.numel()]
            now = place, target, begin_copy(target, source)
            if before is not None:
                yield _arrived(*before)
            before = now
        assert before is not None, "there is at least one piece, if an empty one"
        yield _arrived(*before)

    def _slot(self, index: int) -> Tensor:
        room = residency.CHUNK_BYTES
        if not self._slots or self._slots[0].nbytes != room:
            self._slots = [torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=self._pin) for _ in range(2)]
        return self._slots[index]

    @property
    def nbytes(self) -> int:
        """Bytes of the two buffers; 0 before they are first used."""
        return sum(slot.nbytes for slot in self._slots)


def begin_copy(to: Tensor, source: Tensor) -> torch.cuda.Event | None:
    """Starts a copy to the host in the current stream; returns an event of its end, None if it is already done."""
    to.copy_(source, non_blocking=True)
    if source.device.type != "cuda":
        return None
    waits_asleep = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # no busy wait
    waits_asleep.record(torch.cuda.current_stream(source.device))
    return waits_asleep


def _arrived(place: Tensor, piece: Tensor, copied: torch.cuda.Event | None) -> tuple[Tensor, Tensor]:
    if copied is not None:
        copied.synchronize()
    return place, piece


def no_share() -> Tensor:
    """A new exact accumulator of squares, set to zero: a rank without gradients contributes this to the norm."""
    return torch.zeros(_C.sum_words, dtype=torch.int64, device="cpu")
