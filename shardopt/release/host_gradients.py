"""A gradient in the host's memory: copied from the device piece by piece, added up, and its share of the norm taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.norms import take_pass
from shardopt.layout import Counted
from shardopt.state import residency
from shardopt.state.host_memory import Entry, make_homes

#: Memory for a gradient, and the entry that keeps it page-locked; None for a gradient without elements.
HostPlace = tuple[Tensor, Entry]

#: Pieces of a gradient that are on their way to the host at a time.
PIECES = 2


class HostGradient:
    """One parameter's gradient of a step, or the sum of several.

    Args:
        memory: gets the gradient.
        holders: the ranks that hold the parts of the parameter.

    Attributes:
        sum: the gradients so far: contiguous, of the shape of this rank's part.
        count: how many gradients are on their way to the sum or in it.
        has_share: whether the sum's squares are, or will be, among the shares of the norm.
        is_lost: whether a gradient did not arrive, as an exception was raised.
        arrival: done once the last gradient's memory on the device is not read any more.
    """

    def __init__(self, memory: HostPlace, holders: Counted | None) -> None:
        self.holders = holders
        self.count = 0
        self.has_share = self.is_lost = False
        self.arrival: Future[None] | None = None
        self.use(memory)

    def use(self, memory: HostPlace) -> None:
        """Takes other memory."""
        self.sum, self._locked = memory  # locked as long as the entry lives

    def take(self, gradient: Tensor, *, first: bool, staging: Staging, shares: dict[Counted | None, Tensor]) -> None:
        """Adds a gradient, and takes the sum's share of the norm.

        Args:
            gradient: contiguous, on the parameter's device.
            first: whether it is the step's first one, in whose place the sum begins.
            staging: memory for the pieces of a gradient that is not copied to the sum itself.
            shares: of the norm; grows. Empty for no share.
        """
        try:
            source, total = gradient.view(-1), self.sum.view(-1)
            numel = residency.CHUNK_BYTES // total.itemsize
            places = torch.split(total, numel)
            copies_to = places if first and source.dtype == total.dtype else staging.pieces(places, source.dtype)
            arriving = _arriving(torch.split(source, numel), copies_to)
            for place, piece in zip(places, arriving, strict=True):
                if piece.data_ptr() != place.data_ptr():
                    place.copy_(piece) if first else place.add_(piece)  # in float32, where it is the sum's dtype
                if shares:
                    take_pass(place, _C.NormPass.squares, shares[self.holders])
        except BaseException:
            self.is_lost = True
            raise

    def demand_arrival(self, name: str) -> None:
        """Checks that no gradient was lost, of those that are not on their way any more.

        Raises:
            RuntimeError: one was.
        """
        if self.is_lost:
            raise RuntimeError(
                f"{name}: got a gradient that did not arrive in the host's memory, as its copy raised an exception, "
                "expected a whole one; call optimizer.zero_grad() and backward() again"
            )


class Staging:
    """Page-locked memory for gradients on their way to a sum, used by one gradient at a time.

    Args:
        pin: whether the memory is page-locked.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._slots: list[Tensor] = []

    def pieces(self, places: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
        """A piece of memory for each place in turn, with room for as many elements; each is used again."""
        room = residency.CHUNK_BYTES
        if not self._slots or self._slots[0].nbytes != room:
            self._slots = [
                torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=self._pin) for _ in range(PIECES)
            ]
        for index, place in enumerate(places):
            yield self._slots[index % PIECES].view(dtype)[: place.numel()]

    @property
    def nbytes(self) -> int:
        """Bytes of the memory so far."""
        return sum(slot.nbytes for slot in self._slots)


def _arriving(pieces: Sequence[Tensor], targets: Iterator[Tensor] | Sequence[Tensor]) -> Iterator[Tensor]:
    """Copies pieces to the host's memory; gives each target as its piece has arrived, while the next is on its way."""
    on_their_way: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
    for target, piece in zip(targets, pieces, strict=True):
        on_their_way.append((target, begin_copy(target, piece)))
        if len(on_their_way) == PIECES:
            yield _arrived(*on_their_way.popleft())
    while on_their_way:
        yield _arrived(*on_their_way.popleft())


def _arrived(target: Tensor, copied: torch.cuda.Event | None) -> Tensor:
    if copied is not None:
        copied.synchronize()
    return target


def begin_copy(to: Tensor, source: Tensor) -> torch.cuda.Event | None:
    """Begins a copy to the host's memory in the current stream; gives the event of its end, or None if it is made."""
    to.copy_(source, non_blocking=True)
    if source.device.type != "cuda":
        return None
    waits_asleep = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # leaves the core to others
    waits_asleep.record(torch.cuda.current_stream(source.device))
    return waits_asleep


def memory_for(likes: Sequence[Tensor], *, pin: torch.device | None) -> list[HostPlace]:
    """Places for gradients, in one piece of the host's memory.

    Args:
        likes: tensors of the gradients' shapes and dtypes.
        pin: a GPU for whose copies the memory is locked; None leaves it pageable.

    Raises:
        MemoryError: the host has too little memory, or refuses to lock it.
    """
    return [(entry.view(), entry) for entry in make_homes(likes, pin=pin, what="the gradients")]


def no_shares(gradients: Iterable[HostGradient]) -> dict[Counted | None, Tensor]:
    """Shares of the norm to which no gradient has been added."""
    words = partial(torch.zeros, _C.sum_words, dtype=torch.int64, device="cpu")
    return {gradient.holders: words() for gradient in gradients}
