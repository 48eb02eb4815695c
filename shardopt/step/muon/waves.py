"""Muon's part of a step, in waves of matrices, which limit the memory and overlap communication with computation.

For each wave, kernels write directions from the momentum; an all-to-all gathers each matrix on the rank that owns it,
which orthogonalizes it; a second all-to-all returns the results, by which the kernels' second pass updates weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import LossScaling
from shardopt.kernels.transfers_cuda import CudaTransfers
from shardopt.state.slice_spec import ROW_MOMENTS, StateDict
from shardopt.step.batch import Alike, run_phases
from shardopt.step.context import StepContext
from shardopt.step.cut_blocks import CutBlocks
from shardopt.step.groups import Group, GroupTables
from shardopt.step.inputs import Input
from shardopt.step.muon.matrices import Matrix, Wave, matrices_of, waves_of
from shardopt.step.muon.passes import Operands, Passes
from shardopt.step.rows import ROW

_NONE = torch.empty(0, device="cpu")
_TINY = 1e-10  # added to divisors, as in NorMuon's reference code, so that zeros stay zeros


def wave_steps(
    inputs: Sequence[Input], groups: Sequence[Group], context: StepContext, *, by_number: bool
) -> dict[torch.device, list[WaveStep]]:
    """Divides the matrices of a step into waves, by device, and sets ``begins`` of the inputs, which splits table rows.

    Args:
        inputs: the descriptions of all parameters of the step.
        groups: the options of each param group.
        context: the optimizer.
        by_number: whether the choice of the matrices' owners depends on the parameters' numbers; see :func:`waves_of`.
    """
    by_device: dict[torch.device, list[Matrix]] = {}
    memory = []
    for parameter in inputs:
        orthogonalized = groups[parameter.group].rule.orthogonalized
        if orthogonalized is not None and parameter.spec is not None:
            by_device.setdefault(parameter.device, []).extend(matrices_of(parameter, orthogonalized))
            memory.append(orthogonalized.memory)
    waves: dict[torch.device, list[WaveStep]] = {}
    for device, matrices in by_device.items():
        for matrix in matrices:
            matrix.parameter.begins.setdefault(matrix.part, []).append(matrix.first - matrix.spec.offset)
        divided = waves_of(matrices, min(memory), device.type, by_number=by_number)
        waves[device] = [WaveStep(wave, device, context) for wave in divided]
    return waves


class WaveStep:
    """The matrices of one wave, and the stages of their step: :meth:`begin`, :meth:`orthogonalize`, :meth:`apply`.

    If matrices are sharded, one all-to-all gathers the parts of all matrices of the wave on their owners. If matrices
    are replicated, each owner orthogonalizes its matrices without communication and broadcasts the results.

    Args:
        wave: the matrices, including matrices of parameters without a gradient.
        device: the parameters' device.
        context: the optimizer.

    Attributes:
        tensors: the indices of the parameters.
        cuts: the all-reduces of blocks of the momentum that ranks share.
        ranks: the ranks that share the matrices; None for matrices of this rank alone.
        passes: the kernels' passes over the parameters that have a gradient, per key of a batch.
    """

    def __init__(self, wave: Wave, device: torch.device, context: StepContext) -> None:
        self._wave, self._device, self._context, first = wave, device, context, wave[0]
        self.ranks, self._has_parts = first.ranks, not first.is_copied
        self.tensors = {matrix.parameter.index for matrix in wave}
        self.cuts = CutBlocks({(m.parameter.index, m.part): m.spec for m in wave}.values(), device)
        self.passes: list[Passes] = []
        self._rows, self._places = np.zeros(0, ROW), np.zeros(0, np.int64)  # table rows; per row, its matrix's index
        self._with_gradient: frozenset[int] = frozenset()
        # Index of each matrix's direction in this rank's buffer, and the number of elements of the buffer.
        *self._first, self._numel = accumulate((matrix.space(matrix.rank) for matrix in wave), initial=0)
        self._sent = [0] * len(first.held_by)  # per owner, the number of elements that this rank sends
        for matrix in wave:
            self._sent[matrix.owner] += matrix.space(matrix.rank)
        # The matrices that this rank owns, each with the index of every rank's part in the gathered elements.
        self._owned: list[tuple[Matrix, list[int]]] = [(m, []) for m in wave if m.owner == m.rank]
        self._received = [0] * len(self._sent)  # per rank, the number of elements that this rank gathers
        at = 0
        for rank in range(len(self._sent)):
            for matrix, begins in self._owned:
                begins.append(at)
                at += matrix.space(rank)
                self._received[rank] += matrix.space(rank)
        self._held = self._there = self._gathered = _NONE  # `_there`: where collectives can read
        self._waits: list[Callable[[], object]] = []
        self._row_moments: dict[tuple[int, int], Tensor] = {}  # local state entries, by parameter and slice
        self._found_inf: Tensor | None = None
        self._transfers: CudaTransfers | None = None  # copies offloaded second moments of rows

    def take_rows(self, table: npt.NDArray[np.void]) -> None:
        """Copies the wave's rows from the table of all rows, and notes the matrix of each row."""
        tensors, elements = table["tensor"], table["element"]
        places = np.full(len(table), -1)
        for place, matrix in enumerate(self._wave):
            end = matrix.first + matrix.held(matrix.rank)
            places[(tensors == matrix.parameter.index) & (elements >= matrix.first) & (elements < end)] = place
        self._rows, self._places = table[places >= 0], places[places >= 0]

    def select(self, stepped: Mapping[Alike, Sequence[Input]]) -> None:
        """Makes the kernels' passes over the rows of the parameters that have a gradient."""
        self._with_gradient = frozenset(parameter.index for alike in stepped.values() for parameter in alike)
        self.passes = []
        for key, alike in stepped.items():
            chosen = np.isin(self._rows["tensor"], [parameter.index for parameter in alike])
            if chosen.any():
                rows, places = self._rows[chosen], self._places[chosen]
                self.passes.append(Passes(self._wave, self._first, self._device, key, rows, places, self._context))

    @property
    def communicates(self) -> bool:
        """Whether the wave's step calls collectives."""
        return self.ranks is not None or bool(self.cuts)

    def update(
        self,
        watched: _C.Inputs,
        groups: GroupTables,
        scaling: LossScaling,
        operands: Operands,
        states: Callable[[int], Sequence[StateDict]],
    ) -> None:
        """Prepares a step: takes the gradients' addresses, the options, and the second moments of rows in the state.

        Args:
            watched: fills in the gradients' addresses.
            groups: the tables of options.
            scaling: the loss scale.
            operands: returns this rank's shards of a parameter and its gradient, by the parameter's index.
            states: returns the state of each slice of a parameter, by the parameter's index.
        """
        self._row_moments = {
            (m.parameter.index, m.part): states(m.parameter.index)[m.part][ROW_MOMENTS]
            for m in self._wave
            if m.is_normalized and m.parameter.index in self._with_gradient
        }
        is_offloaded = any(moments.device != self._device for moments in self._row_moments.values())
        residency = self._context.residency
        self._transfers = residency.transfers(self._device, "state") if is_offloaded else None
        self._found_inf = scaling.found_inf
        for passes in self.passes:
            passes.update(watched, groups, scaling, operands)

    def begin(self) -> None:
        """Runs the kernels that update the momentum and write directions, and starts the all-to-all to the owners."""
        self._held = torch.zeros(self._numel, dtype=torch.bfloat16, device=self._device)
        for in_memory, kept in self._kept_row_moments(self._held):
            in_memory.copy_(kept, non_blocking=True)
        run_phases([passes.momentum_into(self._held) for passes in self.passes], self.cuts)
        self._there = self._held if self.ranks is None else self.ranks.to_group_device(self._held)
        if self.ranks is not None and self._has_parts:
            self._gathered = self._there.new_empty(sum(self._received))
            self._waits = [self.ranks.all_to_all(self._gathered, self._there, self._received, self._sent)]

    def orthogonalize(self) -> None:
        """Waits for the parts of this rank's matrices, orthogonalizes them, and starts to send the results back."""
        if self.ranks is not None and self._has_parts:
            self._wait()
            for matrix, begins in self._owned:
                self._orthogonalize_parts(matrix, begins)
            self._waits = [self.ranks.all_to_all(self._there, self._gathered, self._sent, self._received)]
            return
        for m, first in zip(self._wave, self._first, strict=True):
            if m.owner == m.rank and (self.ranks is not None or m.parameter.index in self._with_gradient):
                row_moments = m.row_moments(self._there, first, m.rank)
                _orthogonalize(m, self._there[first : first + m.numel], row_moments)
        for owner, chunk in enumerate(torch.split(self._there, self._sent)):
            if self.ranks is not None and chunk.numel():
                self._waits.append(self.ranks.broadcast(chunk, owner))

    def _orthogonalize_parts(self, matrix: Matrix, begins: list[int]) -> None:
        """Copies parts, gathered at index ``begins[rank]``, into a matrix, orthogonalizes it, and copies it back."""
        whole = self._gathered.new_empty(matrix.numel)
        row_moments = whole.new_zeros(matrix.rows if matrix.is_normalized else 0, dtype=torch.float32)
        parts, moments = [], []  # of each rank: elements, and second moments of rows, in the whole matrix and gathered
        for rank, begin in enumerate(begins):
            of_rows = row_moments[slice(*matrix.row_ranges[rank])]
            moments.append((of_rows, matrix.row_moments(self._gathered, begin, rank)))
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

    def apply(self) -> None:
        """Waits for the orthogonalized directions, updates weights by them, and stores the second moments of rows.

        If a gradient scaler skips the step, the second moments stay unchanged. The host does not wait for copies to its
        memory.
        """
        self._wait()
        directions = self._held
        if self._there is not directions:
            directions.copy_(self._there)
        self._held = self._there = self._gathered = _NONE  # a view would keep the memory
        for passes in self.passes:
            passes.apply(directions)
        for in_memory, kept in self._kept_row_moments(directions):
            if self._found_inf is not None:
                before = kept.to(in_memory.device, non_blocking=True)
                in_memory = torch.where(self._found_inf.to(in_memory.device) > 0, before, in_memory)
            kept.copy_(in_memory, non_blocking=True)
        if self._transfers is not None:
            self._transfers.wait_for_current_stream()
        self._row_moments, self._found_inf, self._transfers = {}, None, None

    def _kept_row_moments(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of views of the second moments of rows that this rank keeps: behind a direction, and in the state."""
        for matrix, first in zip(self._wave, self._first, strict=True):
            entry = self._row_moments.get((matrix.parameter.index, matrix.part))
            if entry is not None:
                rows, kept = matrix.kept_row_moments(entry)
                begin = matrix.row_ranges[matrix.rank][0]
                yield matrix.row_moments(memory, first, matrix.rank)[rows.start - begin : rows.stop - begin], kept

    def _wait(self) -> None:
        for wait in self._waits:
            wait()
        self._waits = []


def _orthogonalize(matrix: Matrix, elements: Tensor, row_moments: Tensor) -> None:
    """Orthogonalizes a whole matrix in place, given its elements and the second moments of its rows, 1-D."""
    if matrix.numel:
        x, row_decay = elements.view(matrix.rows, matrix.cols), matrix.options.row_decay
        result = matrix.options.newton_schulz(x)
        x.copy_(result if row_decay is None else normalized(result, row_moments, row_decay))


def normalized(matrix: Tensor, row_moments: Tensor, decay: float) -> Tensor:
    """Divides each row of an orthogonalized matrix (an output's weights) by the root of the row's second moment.

    NorMuon (Li et al., 2025, arXiv 2510.05491). The result is rescaled to the norm of ``matrix``. All sums are of whole
    rows, in an order that depends on the matrix's shape alone.

    Args:
        matrix: bfloat16, of two dimensions.
        row_moments: float32, ``(rows,)``, an average of each row's mean square over the steps; updated.
        decay: decay rate of the average.

    Returns:
        The normalized matrix: float32, of the shape of ``matrix``.
    """
    norms = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32)
    new = row_moments.lerp(norms.square().div_(max(matrix.shape[1], 1)), 1.0 - decay)
    # An overflow, whose NaN no weight takes, would otherwise stay in the average for good.
    row_moments.copy_(torch.where(new < math.inf, new, row_moments))
    factors = row_moments.sqrt().add_(_TINY).reciprocal_()
    total, new_total = torch.linalg.vector_norm(norms), torch.linalg.vector_norm(norms * factors)
    return matrix * factors.mul_(total / new_total.add_(_TINY)).unsqueeze(1)


def run_waves(waves: Sequence[WaveStep]) -> None:
    """Runs the waves of a device as a pipeline: while one is orthogonalized, the next is gathered, the last returns.

    Waves of different sets of ranks do not overlap: a rank that waits for a wave to return may be a rank for which the
    ranks of another set wait, to begin their wave.
    """
    for _, of_ranks in groupby(waves, key=lambda wave: wave.ranks):
        alike = list(of_ranks)
        for number in range(len(alike) + 2):
            if number < len(alike):
                alike[number].begin()
            if 1 <= number <= len(alike):
                alike[number - 1].orthogonalize()
            if number >= 2:
                alike[number - 2].apply()
