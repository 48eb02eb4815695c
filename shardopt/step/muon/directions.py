"""The directions of a wave on their way from this rank to the matrices' owners, which orthogonalize them, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from shardopt.step.muon.matrices import Matrix, Wave

#: Local state entries with second moments of rows, by the indices of parameter and slice.
RowMoments = Mapping[tuple[int, int], Tensor]

_NONE = torch.empty(0, device="cpu")
_TINY = 1e-10  # by the authors of NorMuon: zeros stay zeros


class Directions:
    """The directions of the matrices of a wave.

    If ranks have parts of the matrices, an owner gathers the parts of all its matrices by one exchange. If each rank
    has all elements, an owner waits for nothing, and sends its matrices to all ranks.

    Args:
        wave: the matrices.
        device: the parameters' device.

    Attributes:
        first: offset of each matrix's elements.
    """

    def __init__(self, wave: Wave, device: torch.device) -> None:
        self._wave, self._device, first = wave, device, wave.matrices[0]
        *self.first, self._numel = accumulate((matrix.space(matrix.rank) for matrix in wave.matrices), initial=0)
        self._ranks, self._has_parts = first.ranks, not first.is_copied
        self._sent = [0] * len(first.held_by)  # elements for each owner
        for matrix, owner in zip(wave.matrices, wave.owners, strict=True):
            self._sent[owner] += matrix.space(matrix.rank)
        # Of the matrices that this rank owns, where each rank's part is among the gathered elements.
        self._owned: list[tuple[Matrix, list[int]]] = [
            (matrix, []) for matrix, owner in zip(wave.matrices, wave.owners, strict=True) if owner == matrix.rank
        ]
        self._received = [0] * len(self._sent)  # elements from each rank
        at = 0
        for rank in range(len(self._sent)):
            for matrix, begins in self._owned:
                begins.append(at)
                at += matrix.space(rank)
                self._received[rank] += matrix.space(rank)
        self._held = self._there = self._gathered = _NONE  # `_there`: within reach of the ranks
        self._waits: list[Callable[[], object]] = []

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
        self._there = self._held if self._ranks is None else self._ranks.within_reach(self._held)
        if self._ranks is not None and self._has_parts:
            self._gathered = self._there.new_empty(sum(self._received))
            self._waits = [self._ranks.all_to_all(self._gathered, self._there, self._received, self._sent)]

    def orthogonalize(self, stepped: Container[int]) -> None:
        """Orthogonalizes the matrices that this rank owns, and begins to send them back.

        Args:
            stepped: indices of the parameters that have a gradient here. Without other ranks, others are left out.
        """
        if self._ranks is not None and self._has_parts:
            self._wait()
            for matrix, begins in self._owned:
                self._orthogonalize_parts(matrix, begins)
            self._waits = [self._ranks.all_to_all(self._there, self._gathered, self._sent, self._received)]
            return
        for matrix, owner, first in zip(self._wave.matrices, self._wave.owners, self.first, strict=True):
            if owner == matrix.rank and (self._ranks is not None or matrix.tensor in stepped):
                row_moments = matrix.row_moments(self._there, first, matrix.rank)
                _orthogonalize(matrix, self._there[first : first + matrix.numel], row_moments)
        for owner, chunk in enumerate(torch.split(self._there, self._sent)):
            if self._ranks is not None and chunk.numel():
                self._waits.append(self._ranks.broadcast(chunk, owner))

    def _orthogonalize_parts(self, matrix: Matrix, begins: list[int]) -> None:
        """Orthogonalizes a matrix whose parts, by rank, begin at these elements of the gathered ones."""
        whole = self._gathered.new_empty(matrix.numel)
        row_moments = whole.new_zeros(0 if matrix.row_decay is None else matrix.rows, dtype=torch.float32)
        parts, moments = [], []  # of each rank: elements, and second moments of rows, in the whole matrix and gathered
        for rank, begin in enumerate(begins):
            moments.append(
                (row_moments[slice(*matrix.row_ranges[rank])], matrix.row_moments(self._gathered, begin, rank))
            )
            for part in matrix.held_by[rank]:
                in_whole = matrix.rectangle(whole, part)
                parts.append((in_whole, self._gathered[begin : begin + in_whole.numel()].view(in_whole.shape)))
                begin += in_whole.numel()
        for in_whole, elements in parts:
            in_whole.copy_(elements)
        for of_rows, gathered in moments:
            torch.maximum(of_rows, gathered, out=of_rows)  # a rank that has never stepped its part of a row has zeros
        _orthogonalize(matrix, whole, row_moments)
        for in_whole, elements in parts:
            elements.copy_(in_whole)
        for of_rows, gathered in moments:
            gathered.copy_(of_rows)

    def receive(self) -> Tensor:
        """Waits for the orthogonalized directions, which replace the others in memory; gives the memory away."""
        self._wait()
        held = self._held
        if self._there is not held:
            held.copy_(self._there)
        self._held = self._there = self._gathered = _NONE  # a view would keep the memory
        return held

    def _wait(self) -> None:
        for wait in self._waits:
            wait()
        self._waits = []


def _orthogonalize(matrix: Matrix, elements: Tensor, row_moments: Tensor) -> None:
    """Orthogonalizes a whole matrix in place, given its elements and the second moments of its rows, 1-D."""
    if matrix.numel:
        x = elements.view(matrix.rows, matrix.cols)
        result = matrix.newton_schulz(x)
        x.copy_(result if matrix.row_decay is None else normalized(result, row_moments, matrix.row_decay))


def normalized(matrix: Tensor, row_moments: Tensor, decay: float) -> Tensor:
    """An orthogonalized matrix whose rows, the outputs' weights, are divided by the roots of their second moments.

    NorMuon (Li et al., 2025, arXiv 2510.05491). The result is rescaled to the norm of ``matrix``. All sums are of whole
    rows, in an order that depends on the matrix's shape alone.

    Args:
        matrix: bfloat16, of two dimensions.
        row_moments: float32, ``(rows,)``, an average of each row's mean square over the steps; updated.
        decay: decay rate of that average.

    Returns:
        float32, of the shape of ``matrix``.
    """
    norms = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32)
    new = row_moments.lerp(norms.square().div_(max(matrix.shape[1], 1)), 1.0 - decay)
    # An overflow, whose NaN no weight takes, would otherwise stay in the average for good.
    row_moments.copy_(torch.where(new < math.inf, new, row_moments))
    factors = row_moments.sqrt().add_(_TINY).reciprocal_()
    total, new_total = torch.linalg.vector_norm(norms), torch.linalg.vector_norm(norms * factors)
    return matrix * factors.mul_(total / new_total.add_(_TINY)).unsqueeze(1)
