"""A gradient in the host's memory: copied from the device piece by piece, added up, and its squares summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.norms import take_pass
from shardopt.layout import Counted
from shardopt.state import residency


class HostGradient:
    """One parameter's gradient of a step, or the sum of several.

    Args:
        name: the parameter's, in errors.
        place: memory for this rank's part.
        holders: the ranks that hold the parts of the parameter.

    Attributes:
        sum: the gradients so far, contiguous.
        count: how many gradients are on their way to the sum or in it.
        squares: the exact sum of the sum's squares, once it is taken; None before, and after a change.
        is_lost: whether a gradient did not arrive, as an exception was raised.
        arrival: done once the last gradient's memory on the device is not read any more.
    """

    def __init__(self, name: str, place: Tensor, holders: Counted | None) -> None:
        self.name, self.holders, self.sum = name, holders, place
        self.count = 0
        self.squares: Tensor | None = None
        self.is_lost = False
        self.arrival: Future[None] | None = None

    def take(self, gradient: Tensor, staging: Staging, *, first: bool, squares: Tensor | None) -> None:
        """Adds a gradient.

        Args:
            gradient: contiguous, on the parameter's device.
            staging: copies it.
            first: whether it is the step's first one, in whose place the sum begins.
            squares: gets the exact sum of the sum's squares; None: they are not wanted.
        """
        try:
            total = self.sum.view(-1)
            is_direct = first and gradient.dtype == total.dtype
            for place, piece in staging.arriving(gradient.view(-1), total, is_direct=is_direct):
                if not is_direct:
                    place.copy_(piece) if first else place.add_(piece)  # in float32, where it is the sum's dtype
                if squares is not None:
                    take_pass(place, _C.NormPass.squares, squares)
            self.squares = squares
        except BaseException:
            self.is_lost = True
            raise

    def share(self, *, largest: bool) -> Tensor:
        """The exact sum of squares, or the bits of the largest magnitude. The other thread must be done with it."""
        if not largest and self.squares is not None:
            return self.squares
        share = no_share()
        take_pass(self.sum.view(-1), _C.NormPass.largest if largest else _C.NormPass.squares, share)
        if not largest:
            self.squares = share
        return share

    def step(self, take: Callable[[], None]) -> None:
        """Takes a step with the gradient, once it has arrived."""
        self.demand_arrival()
        take()

    def demand_arrival(self) -> None:
        """Checks that no gradient was lost, of those that are not on their way any more.

        Raises:
            RuntimeError: one was.
        """
        if self.is_lost:
            raise RuntimeError(
                f"{self.name}: got a gradient that did not arrive in the host's memory, as its copy raised an "
                "exception, expected a whole one; call optimizer.zero_grad() and backward() again"
            )


class Staging:
    """Copies gradients to the host, one at a time, through page-locked memory where they do not go to the sum itself.

    Args:
        pin: whether the memory is page-locked.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._slots: list[Tensor] = []

    def arriving(self, gradient: Tensor, total: Tensor, *, is_direct: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Gives each piece of the sum with the piece of the gradient, once it has arrived, while the next is copied.

        Args:
            gradient: 1-D, on any device.
            total: the sum.
            is_direct: whether the gradient is copied to the sum; else to memory that is used again.
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
        """Bytes of the memory so far."""
        return sum(slot.nbytes for slot in self._slots)


def begin_copy(to: Tensor, source: Tensor) -> torch.cuda.Event | None:
    """Begins a copy to the host's memory in the current stream; gives the event of its end, or None if it is made."""
    to.copy_(source, non_blocking=True)
    if source.device.type != "cuda":
        return None
    waits_asleep = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # leaves the core to others
    waits_asleep.record(torch.cuda.current_stream(source.device))
    return waits_asleep


def _arrived(place: Tensor, piece: Tensor, copied: torch.cuda.Event | None) -> tuple[Tensor, Tensor]:
    if copied is not None:
        copied.synchronize()
    return place, piece


def no_share() -> Tensor:
    """The exact sum of no squares."""
    return torch.zeros(_C.sum_words, dtype=torch.int64, device="cpu")
