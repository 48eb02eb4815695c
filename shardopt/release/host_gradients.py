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
        memory: host memory for the gradient of this rank's shard.
        holders: the ranks that hold the parameter's shards, over which the norm is summed; None if each has all of it.

    Attributes:
        sum: the sum of the gradients so far, contiguous.
        count: how many gradients were added to the sum, or are in flight to it.
        squares: the exact sum of the squares of ``sum``'s elements; None if it is not computed, or out of date.
        is_incomplete: whether a copy raised an exception, so that ``sum`` lacks a gradient or has a part of one.
        copied: a future that is done once the last copy has read its gradient, whose memory may then be reused.
    """

    def __init__(self, name: str, memory: Tensor, holders: HoldersForSums | None) -> None:
        self.name, self.holders, self.sum = name, holders, memory
        self.count = 0
        self.squares: Tensor | None = None
        self.is_incomplete = False
        self.copied: Future[None] | None = None

    def add(self, gradient: Tensor, staging: Staging, *, is_first: bool, squares: Tensor | None) -> None:
        """Copies a gradient to the host and adds it to the sum; runs in the worker thread.

        The gradient is contiguous, on the parameter's device. With ``is_first`` it overwrites the sum of the last step.
        ``squares`` is zeros, to which the squares of the new sum's elements are added; None leaves them out.
        """
        try:
            total = self.sum.view(-1)
            into_sum = is_first and gradient.dtype == total.dtype
            for sum_piece, piece in staging.copied_pieces(gradient.view(-1), total, into_sum=into_sum):
                if not into_sum:
                    sum_piece.copy_(piece) if is_first else sum_piece.add_(piece)
                if squares is not None:
                    accumulate_norm(sum_piece, _C.NormPass.squares, squares)
            self.squares = squares
        except BaseException:
            self.is_incomplete = True
            raise

    def norm_share(self, *, largest: bool) -> Tensor:
        """The exact sum of squares; with ``largest`` the bits of the largest magnitude, in the first word instead.

        No copy to the sum may be in flight. Squares that were summed as gradients arrived are not computed again.
        """
        if not largest and self.squares is not None:
            return self.squares
        share = zero_share()
        accumulate_norm(self.sum.view(-1), _C.NormPass.largest if largest else _C.NormPass.squares, share)
        if not largest:
            self.squares = share
        return share

    def step(self, step: Callable[[], None]) -> None:
        """Steps the parameter by ``step`` unless a copy to the sum has failed; runs in the worker thread."""
        self.check_complete()
        step()

    def check_complete(self) -> None:
        """Raises RuntimeError if a copy that has ended so far has raised an exception: the sum is incomplete."""
        if self.is_incomplete:
            raise RuntimeError(
                f"{self.name}: got a gradient that did not arrive in the host's memory, as its copy raised an "
                "exception; call optimizer.zero_grad() and backward() again"
            )


class Staging:
    """Copies gradients to the host, one at a time: into the sum's memory, or through two buffers to be added to it.

    Args:
        pin: whether the buffers are pinned memory, as for gradients on a GPU.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._buffers: list[Tensor] = []

    def copied_pieces(self, gradient: Tensor, total: Tensor, *, into_sum: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Gives each piece of the sum with the gradient's piece on the host, while the next piece is being copied.

        Args:
            gradient: 1-D, on any device.
            total: the sum, 1-D, of the same number of elements.
            into_sum: whether to copy straight into the sum; otherwise into one of two buffers, which are reused.
        """
        numel = residency.CHUNK_BYTES // total.itemsize
        pieces = zip(torch.split(total, numel), torch.split(gradient, numel), strict=True)
        previous: tuple[Tensor, Tensor, torch.cuda.Event | None] | None = None
        for index, (sum_piece, source) in enumerate(pieces):
            target = sum_piece if into_sum else self._buffer(index % 2).view(source.dtype)[: source.numel()]
            started = sum_piece, target, begin_copy(target, source)
            if previous is not None:
                yield _wait_for_piece(*previous)
            previous = started
        assert previous is not None, "there is at least one piece, if an empty one"
        yield _wait_for_piece(*previous)

    def _buffer(self, index: int) -> Tensor:
        """One of the two buffers. Allocates both at the first call, and after the size of chunks was changed."""
        size = residency.CHUNK_BYTES
        if not self._buffers or self._buffers[0].nbytes != size:
            self._buffers = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pin) for _ in range(2)]
        return self._buffers[index]

    @property
    def nbytes(self) -> int:
        """Bytes of the two buffers; 0 before they are first used."""
        return sum(buffer.nbytes for buffer in self._buffers)


def begin_copy(to: Tensor, source: Tensor) -> torch.cuda.Event | None:
    """Starts a copy to the host in the current stream; returns an event of its end, None if it is already done."""
    to.copy_(source, non_blocking=True)
    if source.device.type != "cuda":
        return None
    end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting threads sleep
    end.record(torch.cuda.current_stream(source.device))
    return end


def _wait_for_piece(sum_piece: Tensor, piece: Tensor, copied: torch.cuda.Event | None) -> tuple[Tensor, Tensor]:
    """Waits until a piece of the gradient is on the host; returns it after the piece of the sum to add it to."""
    if copied is not None:
        copied.synchronize()
    return sum_piece, piece


def zero_share() -> Tensor:
    """A new exact accumulator of squares, set to zero: the contribution to the norm of a rank without gradients."""
    return torch.zeros(_C.sum_words, dtype=torch.int64, device="cpu")
