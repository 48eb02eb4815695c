"""The directions of a wave on their way from this rank to the matrices' owners, which orthogonalize them, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.layout import Region
from shardopt.step.muon.matrices import Matrix, Wave
from shardopt.step.muon.normalized import normalized

#: Local state entries with second moments of rows, by the indices of parameter and slice.
RowMoments = Mapping[tuple[int, int], Tensor]


class Directions:
    """The directions of the matrices of a wave.

    Args:
        wave: the matrices.
        device: the parameters' device.

    Attributes:
        first: offset of each matrix's elements.
    """

    def __init__(self, wave: Wave, device: torch.device) -> None:
        self._wave, self._device = wave, device
        *self.first, self._numel = accumulate((matrix.space(matrix.rank) for matrix in wave.matrices), initial=0)
        self._transport: _Transport | None = None
        if wave.division is not None:
            self._transport = (_Copies if wave.division.is_copied else _Parts)(wave, self.first)
        self._held = torch.empty(0, device="cpu")

    def begin(self, row_moments: RowMoments) -> Tensor:
        """Memory for this rank's elements: bfloat16, 1-D, zero, with the second moments of rows behind each matrix's.

        Args:
            row_moments: this rank's state entries with second moments of rows.
        """
        self._held = torch.zeros(self._numel, dtype=torch.bfloat16, device=self._device)
        for in_memory, kept in self._row_moments(self._held, row_moments):
            in_memory.copy_(kept, non_blocking=True)
        return self._held

    def keep(self, row_moments: RowMoments, directions: Tensor, found_inf: Tensor | None) -> None:
        """Stores the second moments of rows that came back with the directions, unless the step is skipped.

        The host does not wait for copies to its memory.

        Args:
            row_moments: this rank's state entries.
            directions: the memory.
            found_inf: above 0 for a step that a gradient scaler skips; None without one.
        """
        for in_memory, kept in self._row_moments(directions, row_moments):
            if found_inf is not None:
                before = kept.to(in_memory.device, non_blocking=True)
                in_memory = torch.where(found_inf.to(in_memory.device) > 0, before, in_memory)
            kept.copy_(in_memory, non_blocking=True)

    def _row_moments(self, memory: Tensor, row_moments: RowMoments) -> Iterator[tuple[Tensor, Tensor]]:
        """The second moments of rows that this rank keeps: in memory, and in the state."""
        for matrix, first in zip(self._wave.matrices, self.first, strict=True):
            entry = row_moments.get((matrix.tensor, matrix.part))
            if entry is not None:
                rows, kept = matrix.kept_row_moments(entry)
                begin = matrix.row_ranges[matrix.rank][0]
                yield matrix.row_moments(memory, first, matrix.rank)[rows.start - begin : rows.stop - begin], kept

    def send(self) -> None:
        """Begins to send the directions to the matrices' owners."""
        if self._transport is not None:
            self._transport.send(self._held)

    def orthogonalize(self, stepped: Container[int]) -> None:
        """Orthogonalizes the matrices that this rank owns, and begins to send them back.

        Args:
            stepped: indices of the parameters that have a gradient here. Without other ranks, others are left out.
        """
        if self._transport is not None:
            self._transport.orthogonalize()
            return
        for matrix, first in zip(self._wave.matrices, self.first, strict=True):
            if matrix.tensor in stepped:
                row_moments = matrix.row_moments(self._held, first, matrix.rank)
                _orthogonalize(matrix, self._held[first : first + matrix.numel], row_moments)

    def receive(self) -> Tensor:
        """Waits for the orthogonalized directions, which replace the others in memory; gives the memory away."""
        held, self._held = self._held, torch.empty(0, device="cpu")  # a view would keep the memory
        if self._transport is not None:
            self._transport.receive(held)
        return held


def _orthogonalize(matrix: Matrix, elements: Tensor, row_moments: Tensor) -> None:
    """Orthogonalizes a whole matrix in place, given its elements and the second moments of its rows, 1-D."""
    if matrix.numel:
        x = elements.view(matrix.rows, matrix.cols)
        result = matrix.newton_schulz(x)
        x.copy_(result if matrix.row_decay is None else normalized(result, row_moments, matrix.row_decay))


class _Transport(ABC):
    """The transport of directions.

    Args:
        wave: the matrices.
        first: offsets of the matrices' elements on this rank.
    """

    def __init__(self, wave: Wave, first: Sequence[int]) -> None:
        assert wave.division is not None
        self._ranks, self._size = wave.division.ranks, len(wave.division.regions)
        self._wave, self._first = wave, first
        self._sent = [0] * self._size  # elements for each owner
        for matrix, owner in zip(wave.matrices, wave.owners, strict=True):
            self._sent[owner] += matrix.space(matrix.rank)
        self._waits: list[Callable[[], object]] = []
        self._there = torch.empty(0, device="cpu")

    def _owned_by(self, rank: int) -> Iterator[tuple[Matrix, int]]:
        """The matrices of an owner, and the offsets of their elements on this rank."""
        for matrix, owner, first in zip(self._wave.matrices, self._wave.owners, self._first, strict=True):
            if owner == rank:
                yield matrix, first

    def _wait(self) -> None:
        for wait in self._waits:
            wait()
        self._waits = []

    def send(self, held: Tensor) -> None:
        """Begins to send this rank's elements."""
        self._there = self._ranks.within_reach(held)

    @abstractmethod
    def orthogonalize(self) -> None:
        """Orthogonalizes the matrices that this rank owns, and begins to send them back."""

    def receive(self, held: Tensor) -> None:
        """Waits for the orthogonalized directions, and replaces this rank's elements by them."""
        self._wait()
        if self._there is not held:
            held.copy_(self._there)
        self._there = torch.empty(0, device="cpu")


class _Copies(_Transport):
    """Transport if each rank has all elements: an owner waits for nothing, and sends its matrices to all ranks."""

    def orthogonalize(self) -> None:
        for matrix, first in self._owned_by(self._ranks.rank):
            row_moments = matrix.row_moments(self._there, first, self._ranks.rank)
            _orthogonalize(matrix, self._there[first : first + matrix.numel], row_moments)
        for owner, chunk in enumerate(torch.split(self._there, self._sent)):
            if chunk.numel():
                self._waits.append(self._ranks.broadcast(chunk, owner))


class _Piece(NamedTuple):
    """One rank's elements of a matrix that this rank owns.

    Attributes:
        first: offset in the memory in which the owner gathers elements.
        region: the elements' place in the parameter.
        rank: the rank's place among those that divide the matrix.
    """

    first: int
    region: Region
    rank: int

    def row_moments(self, matrix: Matrix, gathered: Tensor) -> Tensor:
        """The second moments of rows that the rank sends and gets: a view."""
        return matrix.row_moments(gathered, self.first, self.rank)


class _Parts(_Transport):
    """Transport if the ranks have parts: an owner gathers the parts of all its matrices by one exchange."""

    def __init__(self, wave: Wave, first: Sequence[int]) -> None:
        super().__init__(wave, first)
        self._owned = [matrix for matrix, _ in self._owned_by(self._ranks.rank)]
        self._pieces: list[list[_Piece]] = [[] for _ in self._owned]
        self._received, at = [0] * self._size, 0
        for rank in range(self._size):
            for matrix, pieces in zip(self._owned, self._pieces, strict=True):
                pieces.append(_Piece(at, matrix.regions[rank], rank))
                at += matrix.space(rank)
                self._received[rank] += matrix.space(rank)
        self._gathered = torch.empty(0, device="cpu")

    def send(self, held: Tensor) -> None:
        super().send(held)
        self._gathered = self._there.new_empty(sum(self._received))
        self._waits = [self._ranks.all_to_all(self._gathered, self._there, self._received, self._sent)]

    def orthogonalize(self) -> None:
        self._wait()
        for matrix, pieces in zip(self._owned, self._pieces, strict=True):
            whole = self._gathered.new_empty(matrix.numel)
            row_moments = whole.new_zeros(0 if matrix.row_decay is None else matrix.rows, dtype=torch.float32)
            for piece in pieces:
                piece.region.of(whole, matrix.start).copy_(_view(self._gathered, piece.first, piece.region))
                of_rows = row_moments[slice(*matrix.row_ranges[piece.rank])]
                # A rank that has never stepped its part of a row has zeros.
                torch.maximum(of_rows, piece.row_moments(matrix, self._gathered), out=of_rows)
            _orthogonalize(matrix, whole, row_moments)
            for piece in pieces:
                _view(self._gathered, piece.first, piece.region).copy_(piece.region.of(whole, matrix.start))
                piece.row_moments(matrix, self._gathered).copy_(row_moments[slice(*matrix.row_ranges[piece.rank])])
        self._waits = [self._ranks.all_to_all(self._there, self._gathered, self._sent, self._received)]

    def receive(self, held: Tensor) -> None:
        super().receive(held)
        self._gathered = torch.empty(0, device="cpu")


def _view(gathered: Tensor, first: int, region: Region) -> Tensor:
    """A piece as a tensor of the region's shape."""
    return gathered[first : first + region.numel].view(region.shape)
