"""The directions of a wave on their way from this rank to the matrices' owners, which orthogonalize them, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.layout import Ranks, Region
from shardopt.step.agreement import NO, YES, Plan
from shardopt.step.muon.matrices import BYTES, Matrix, Wave, padded
from shardopt.step.muon.normalized import normalized

#: Local state entries with second moments of rows, by the indices of parameter and slice.
RowMoments = Mapping[tuple[int, int], Tensor]


class Directions:
    """The directions of the matrices of a wave.

    Args:
        wave: the matrices.
        device: the parameters' device.
        plan: the ranks' plan, which knows the gradients of the step.
    """

    def __init__(self, wave: Wave, device: torch.device, plan: Plan) -> None:
        self._wave, self._device = wave, device
        division = wave.division
        self._roll = roll = _Roll(plan, wave) if division is not None else None
        #: Offset of each matrix's elements.
        self.first: list[int] = []
        at = 0
        chunks: list[int] = []  # offset of each owner's chunk, which begins with a roll
        for matrix, owner in zip(wave.matrices, wave.owners, strict=True):
            while roll is not None and len(chunks) <= owner:
                chunks.append(at)
                at += roll.numel
            self.first.append(at)
            at += matrix.space(matrix.rank)
        while roll is not None and len(chunks) < len(wave.matrices[0].regions):
            chunks.append(at)
            at += roll.numel
        self._numel = at
        self._transport: _Transport | None = None
        if division is not None and roll is not None:
            kind = _Copies if division.is_copied else _Parts
            self._transport = kind(wave, self.first, [*chunks, at], roll)
        self._held = torch.empty(0, device="cpu")

    @property
    def journey(self) -> Journey | None:
        """The message to other ranks; None without other ranks."""
        return None if self._transport is None else self._transport.form

    @property
    def memory(self) -> list[Tensor]:
        """Tensors that live from step to step."""
        return [] if self._roll is None else [self._roll.own]

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


class Journey(NamedTuple):
    """The shape of the first message with directions: an :class:`Opening`.

    Attributes:
        ranks: the ranks.
        is_copied: True if each owner broadcasts a part of the message; False if each rank sends to each owner.
        chunks: offsets of the message's parts for or by each owner, which begin with rolls, and the end of the last.
        rolls: offsets of the rolls in the received message.
        received: elements from each rank.
    """

    ranks: Ranks
    is_copied: bool
    chunks: Sequence[int]
    rolls: Sequence[int]
    received: Sequence[int]

    def say_changed(self) -> bool:
        """See :class:`Opening`."""
        message = torch.zeros(BYTES * self.chunks[-1], dtype=torch.uint8, device="cpu")
        message[[BYTES * begin for begin in self.chunks[:-1]]] = NO
        message = self.ranks.within_reach(message)
        parts = [slice(BYTES * begin, BYTES * end) for begin, end in pairwise(self.chunks)]
        if self.is_copied:
            answers = message
            waits = [self.ranks.broadcast(message[part].view(torch.bfloat16), at) for at, part in enumerate(parts)]
        else:
            received, sent = ([BYTES * x for x in self.received], [part.stop - part.start for part in parts])
            answers = message.new_empty(sum(received))
            waits = [self.ranks.all_to_all(answers, message, received, sent)]
        for wait in waits:
            wait()
        return bool((answers[[BYTES * begin for begin in self.rolls]] == NO).all())


class _Roll:
    """This rank's roll in front of each owner's directions.

    Args:
        plan: the ranks' plan.
        wave: the matrices.

    Attributes:
        plan: see above.
        numel: elements of the roll.
        own: this rank's answers, on the device of the last message.
    """

    def __init__(self, plan: Plan, wave: Wave) -> None:
        assert wave.division is not None
        self.plan = plan
        self.own = plan.short_roll(wave.division.ranks, list(dict.fromkeys(matrix.tensor for matrix in wave.matrices)))
        self.numel = padded(-(-len(self.own) // BYTES))

    def enter(self, message: Tensor, begins: Sequence[int]) -> None:
        """Writes the roll at these offsets of a message: bfloat16, 1-D."""
        self.own = self.own.to(message.device)
        for begin in begins:
            message[begin : begin + self.numel].view(torch.uint8)[: len(self.own)] = self.own

    def differs(self, message: Tensor, begins: Sequence[int]) -> bool:
        """Whether the rolls of all ranks at these offsets differ. False on a GPU, for which the host does not wait."""
        if message.is_cuda:
            return False
        answers = torch.stack(
            [message[begin : begin + self.numel].view(torch.uint8)[: len(self.own)] for begin in begins]
        )
        return bool(((answers == YES).any(0) & (answers == NO).any(0)).any())


class _Transport(ABC):
    """The transport of directions.

    Args:
        wave: the matrices.
        first: offsets of the matrices' elements on this rank.
        chunks: offsets of the directions for each owner, which begin with a roll, and the end of the last.
        roll: this rank's roll.
    """

    def __init__(self, wave: Wave, first: Sequence[int], chunks: Sequence[int], roll: _Roll) -> None:
        assert wave.division is not None
        self._ranks, self._size = wave.division.ranks, len(wave.division.regions)
        self._wave, self._first, self._chunks, self._roll = wave, first, chunks, roll
        self._waits: list[Callable[[], object]] = []
        self._there = torch.empty(0, device="cpu")

    @property
    def form(self) -> Journey:
        """The shape of the first message."""
        return Journey(self._ranks, True, self._chunks, self._chunks[:-1], ())

    def _owned_by(self, rank: int) -> Iterator[tuple[Matrix, int]]:
        """The matrices of an owner, and the offsets of their elements on this rank."""
        for matrix, owner, first in zip(self._wave.matrices, self._wave.owners, self._first, strict=True):
            if owner == rank:
                yield matrix, first

    def _chunk(self, owner: int) -> slice:
        """The place of the roll and of this rank's elements of an owner's matrices."""
        return slice(self._chunks[owner], self._chunks[owner + 1])

    def _wait(self) -> None:
        for wait in self._waits:
            wait()
        self._waits = []

    @abstractmethod
    def _received_rolls(self) -> tuple[Tensor, Sequence[int]]:
        """The memory with the rolls of all ranks, and their offsets."""

    def _differs(self) -> bool:
        self._wait()
        return self._roll.differs(*self._received_rolls())

    def _check(self) -> None:
        self._roll.plan.check(self._ranks, differs=self._differs())

    def send(self, held: Tensor) -> None:
        """Begins to send this rank's elements."""
        self._roll.enter(held, self._chunks[:-1])
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
        self._roll.plan.sent(self._ranks, self._differs)
        for owner in range(self._size):
            self._waits.append(self._ranks.broadcast(self._there[self._chunk(owner)], owner))

    def receive(self, held: Tensor) -> None:
        self._check()
        super().receive(held)

    def _received_rolls(self) -> tuple[Tensor, Sequence[int]]:
        return self._there, self._chunks[:-1]


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

    def __init__(self, wave: Wave, first: Sequence[int], chunks: Sequence[int], roll: _Roll) -> None:
        super().__init__(wave, first, chunks, roll)
        self._rolls: list[int] = []  # offsets of all ranks' rolls in the gathered memory
        chunks_of = [self._chunk(owner) for owner in range(self._size)]
        self._sent = [chunk.stop - chunk.start for chunk in chunks_of]
        self._owned = [matrix for matrix, _ in self._owned_by(self._ranks.rank)]
        self._pieces: list[list[_Piece]] = [[] for _ in self._owned]
        self._received, at = [0] * self._size, 0
        for rank in range(self._size):
            self._rolls.append(at)
            at += roll.numel
            self._received[rank] += roll.numel
            for matrix, pieces in zip(self._owned, self._pieces, strict=True):
                pieces.append(_Piece(at, matrix.regions[rank], rank))
                at += matrix.space(rank)
                self._received[rank] += matrix.space(rank)
        self._gathered = torch.empty(0, device="cpu")

    @property
    def form(self) -> Journey:
        return Journey(self._ranks, False, self._chunks, self._rolls, self._received)

    def send(self, held: Tensor) -> None:
        super().send(held)
        self._gathered = self._there.new_empty(sum(self._received))
        self._roll.plan.sent(self._ranks, self._differs)
        self._waits = [self._ranks.all_to_all(self._gathered, self._there, self._received, self._sent)]

    def orthogonalize(self) -> None:
        self._check()
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

    def _received_rolls(self) -> tuple[Tensor, Sequence[int]]:
        return self._gathered, self._rolls


def _view(gathered: Tensor, first: int, region: Region) -> Tensor:
    """A piece as a tensor of the region's shape."""
    return gathered[first : first + region.numel].view(region.shape)
