"""The directions of a wave on their way: from this rank to the matrices' owners, orthogonalized there, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.layout import Region
from shardopt.step.matrices import Matrix, Wave, padded


class Directions:
    """The directions of the matrices of a wave.

    Args:
        wave: the matrices.
        device: of the parameters.
    """

    def __init__(self, wave: Wave, device: torch.device) -> None:
        self._wave, self._device = wave, device
        division = wave.division
        ends = list(accumulate((padded(matrix.held.numel) for matrix in wave.matrices), initial=0))
        #: Where each matrix's elements begin.
        self.first, self._numel = ends[:-1], ends[-1]
        self._journey: _Journey | None = None
        if division is not None:
            self._journey = _Copies(wave, ends) if division.is_copied else _Parts(wave, ends)
        self._held = torch.empty(0, device="cpu")

    @property
    def communicates(self) -> bool:
        """Whether other ranks take part."""
        return self._journey is not None

    def begin(self) -> Tensor:
        """Memory for this rank's elements: bfloat16, 1-D, zero."""
        self._held = torch.zeros(self._numel, dtype=torch.bfloat16, device=self._device)
        return self._held

    def send(self) -> None:
        """Begins to send them to the matrices' owners."""
        if self._journey is not None:
            self._journey.send(self._held)

    def orthogonalize(self, stepped: Container[int]) -> None:
        """Orthogonalizes the matrices that this rank owns, and begins to send them back.

        Args:
            stepped: indices of the parameters that have a gradient here. Others are left out if no other rank knows.
        """
        if self._journey is not None:
            self._journey.orthogonalize()
            return
        for matrix, first in zip(self._wave.matrices, self.first, strict=True):
            if matrix.tensor in stepped:
                _orthogonalize(matrix, self._held[first : first + matrix.numel])

    def receive(self) -> Tensor:
        """Waits for the orthogonalized directions, which stand where the others stood; the memory is given away."""
        held, self._held = self._held, torch.empty(0, device="cpu")  # a view of it would keep the memory
        if self._journey is not None:
            self._journey.receive(held)
        return held


def _orthogonalize(matrix: Matrix, elements: Tensor) -> None:
    """Replaces the elements of a whole matrix, 1-D, by those of the orthogonalized one."""
    if matrix.numel:
        x = elements.view(matrix.rows, matrix.cols)
        x.copy_(matrix.newton_schulz(x))


class _Journey(ABC):
    """How directions travel.

    Args:
        wave: the matrices.
        ends: where their elements on this rank begin, and the end of the last.
    """

    def __init__(self, wave: Wave, ends: list[int]) -> None:
        assert wave.division is not None
        self._ranks, self._size = wave.division.ranks, len(wave.division.regions)
        self._wave, self._ends = wave, ends
        self._waits: list[Callable[[], object]] = []
        self._there = torch.empty(0, device="cpu")

    def _owned_by(self, rank: int) -> Iterator[tuple[Matrix, int]]:
        """The matrices of an owner, and where their elements begin on this rank."""
        for matrix, owner, first in zip(self._wave.matrices, self._wave.owners, self._ends, strict=False):
            if owner == rank:
                yield matrix, first

    def _chunk(self, owner: int) -> slice:
        """Where this rank's elements of an owner's matrices are."""
        owners = self._wave.owners
        first = next((i for i, rank in enumerate(owners) if rank >= owner), len(owners))
        end = next((i for i, rank in enumerate(owners) if rank > owner), len(owners))
        return slice(self._ends[first], self._ends[end])

    def _wait(self) -> None:
        for wait in self._waits:
            wait()
        self._waits = []

    def send(self, held: Tensor) -> None:
        """Begins to send this rank's elements."""
        self._there = self._ranks.within_reach(held)

    @abstractmethod
    def orthogonalize(self) -> None:
        """Orthogonalizes what this rank owns, and begins to send it back."""

    def receive(self, held: Tensor) -> None:
        """Waits for what was sent back, and puts it where this rank's elements were."""
        self._wait()
        if self._there is not held:
            held.copy_(self._there)
        self._there = torch.empty(0, device="cpu")


class _Copies(_Journey):
    """Where each rank has all elements: an owner has nothing to wait for, and sends its matrices to all."""

    def orthogonalize(self) -> None:
        for matrix, first in self._owned_by(self._ranks.rank):
            _orthogonalize(matrix, self._there[first : first + matrix.numel])
        for owner in range(self._size):
            chunk = self._there[self._chunk(owner)]
            if len(chunk):
                self._waits.append(self._ranks.broadcast(chunk, owner))


class _Piece(NamedTuple):
    """One rank's elements of a matrix that this rank owns.

    Attributes:
        first: where they begin in the memory in which the owner gathers them.
        region: which elements of the parameter they are.
    """

    first: int
    region: Region


class _Parts(_Journey):
    """Where the ranks have parts: an owner gathers them, all its matrices' by one exchange."""

    def __init__(self, wave: Wave, ends: list[int]) -> None:
        super().__init__(wave, ends)
        chunks = [self._chunk(owner) for owner in range(self._size)]
        self._sent = [chunk.stop - chunk.start for chunk in chunks]
        self._owned = [matrix for matrix, _ in self._owned_by(self._ranks.rank)]
        self._pieces: list[list[_Piece]] = [[] for _ in self._owned]
        self._received, at = [0] * self._size, 0
        for rank in range(self._size):
            for matrix, pieces in zip(self._owned, self._pieces, strict=True):
                region = matrix.regions[rank]
                pieces.append(_Piece(at, region))
                at += padded(region.numel)
                self._received[rank] += padded(region.numel)
        self._gathered = torch.empty(0, device="cpu")

    def send(self, held: Tensor) -> None:
        super().send(held)
        self._gathered = self._there.new_empty(sum(self._received))
        self._waits = [self._ranks.all_to_all(self._gathered, self._there, self._received, self._sent)]

    def orthogonalize(self) -> None:
        self._wait()
        for matrix, pieces in zip(self._owned, self._pieces, strict=True):
            whole = self._gathered.new_empty(matrix.numel)
            for first, region in pieces:
                region.of(whole, matrix.start).copy_(_view(self._gathered, first, region))
            _orthogonalize(matrix, whole)
            for first, region in pieces:
                _view(self._gathered, first, region).copy_(region.of(whole, matrix.start))
        self._waits = [self._ranks.all_to_all(self._there, self._gathered, self._sent, self._received)]

    def receive(self, held: Tensor) -> None:
        super().receive(held)
        self._gathered = torch.empty(0, device="cpu")


def _view(gathered: Tensor, first: int, region: Region) -> Tensor:
    """A piece as a tensor of the region's shape."""
    return gathered[first : first + region.numel].view(region.shape)
