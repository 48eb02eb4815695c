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
from shardopt.step.batch import BatchKey, run_phases
from shardopt.step.context import StepContext
from shardopt.step.cut_blocks import CutBlocks
from shardopt.step.groups import Group, GroupTables
from shardopt.step.inputs import StepParameter
from shardopt.step.muon.matrices import Matrix, Wave, matrices_of, waves_of
from shardopt.step.muon.passes import Operands, Passes
from shardopt.step.rows import ROW

_NONE = torch.empty(0, device="cpu")
_TINY = 1e-10  # added to divisors, as in NorMuon's reference code, so that zeros stay zeros


def make_waves(
    parameters: Sequence[StepParameter], groups: Sequence[Group], context: StepContext, *, by_number: bool
) -> dict[torch.device, list[WaveStep]]:
    """Divides the matrices of a step into waves, by device. Sets ``matrix_begins`` of the parameters.

    ``by_number`` says how the owners of matrices are chosen; see :func:`waves_of`.
    """
    by_device: dict[torch.device, list[Matrix]] = {}
    memory = []
    for parameter in parameters:
        orthogonalized = groups[parameter.group].rule.orthogonalized
        if orthogonalized is not None and parameter.spec is not None:
            by_device.setdefault(parameter.device, []).extend(matrices_of(parameter, orthogonalized))
            memory.append(orthogonalized.memory)
    waves: dict[torch.device, list[WaveStep]] = {}
    for device, matrices in by_device.items():
        for matrix in matrices:
            begins = matrix.parameter.matrix_begins.setdefault(matrix.slice_index, [])
            begins.append(matrix.local_begin - matrix.spec.offset)
        divided = waves_of(matrices, min(memory), device.type, by_number=by_number)
        waves[device] = [WaveStep(wave, device, context) for wave in divided]
    return waves


class WaveStep:
    """The matrices of one wave, and the stages of their step: :meth:`begin`, :meth:`orthogonalize`, :meth:`apply`.

    If matrices are sharded, one all-to-all gathers the parts of all matrices of the wave on their owners. If matrices
    are replicated, each owner orthogonalizes its matrices without communication and broadcasts the results.

    Args:
        wave: the matrices, including matrices of parameters without a gradient.

    Attributes:
        parameters: the indices of the parameters.
        cuts: the all-reduces of blocks of the momentum that ranks share.
        ranks: the ranks that share the matrices; None for matrices of this rank alone.
        passes: the kernels' passes over the parameters that have a gradient, per key of a batch.
    """

    def __init__(self, wave: Wave, device: torch.device, context: StepContext) -> None:
        self._wave, self._device, self._context = wave, device, context
        self.ranks, self._is_sharded = wave[0].ranks, not wave[0].is_replicated
        self.parameters = {matrix.parameter.index for matrix in wave}
        self.cuts = CutBlocks({(m.parameter.index, m.slice_index): m.spec for m in wave}.values(), device)
        self.passes: list[Passes] = []
        self._rows, self._matrix_of_row = np.zeros(0, ROW), np.zeros(0, np.int64)  # see take_rows
        self._with_gradient: frozenset[int] = frozenset()
        # Index of each matrix's direction in this rank's buffer, and the number of elements of the buffer.
        *self._begins, self._numel = accumulate((matrix.message_numel(matrix.rank) for matrix in wave), initial=0)
        self._sent = [0] * len(wave[0].parts)  # per owner, the number of elements that this rank sends
        for matrix in wave:
            self._sent[matrix.owner] += matrix.message_numel(matrix.rank)
        # The matrices that this rank owns, each with the index of every rank's part in the gathered elements.
        self._owned: list[tuple[Matrix, list[int]]] = [(m, []) for m in wave if m.owner == m.rank]
        self._received = [0] * len(self._sent)  # per rank, the number of elements that this rank gathers
        gathered = 0
        for rank in range(len(self._sent)):
            for matrix, begins in self._owned:
                begins.append(gathered)
                gathered += matrix.message_numel(rank)
                self._received[rank] += matrix.message_numel(rank)
        # Buffers: directions of this rank's parts, for kernels and for collectives; parts of matrices that it owns.
        self._directions = self._message = self._gathered = _NONE
        self._waits: list[Callable[[], object]] = []  # for the collectives that are in flight
        self._row_moments: dict[tuple[int, int], Tensor] = {}  # local state entries, by parameter and slice
        self._found_inf: Tensor | None = None
        self._transfers: CudaTransfers | None = None  # so that its synchronize() waits for copies of offloaded moments

    def take_rows(self, table: npt.NDArray[np.void]) -> None:
        """Copies the wave's rows from the table of all rows; keeps, per row, its matrix's index in the wave."""
        parameters, elements = table["parameter"], table["element"]
        matrix_of_row = np.full(len(table), -1)
        for index, matrix in enumerate(self._wave):
            begin, end = matrix.local_begin, matrix.local_begin + matrix.local_numel(matrix.rank)
            is_in_matrix = (parameters == matrix.parameter.index) & (elements >= begin) & (elements < end)
            matrix_of_row[is_in_matrix] = index
        self._rows, self._matrix_of_row = table[matrix_of_row >= 0], matrix_of_row[matrix_of_row >= 0]

    def select(self, stepped: Mapping[BatchKey, Sequence[StepParameter]]) -> None:
        """Makes the kernels' passes over the rows of the parameters that have a gradient."""
        self._with_gradient = frozenset(parameter.index for of_key in stepped.values() for parameter in of_key)
        self.passes = []
        for key, of_key in stepped.items():
            chosen = np.isin(self._rows["parameter"], [parameter.index for parameter in of_key])
            if chosen.any():
                rows, matrix_of_row = self._rows[chosen], self._matrix_of_row[chosen]
                passes = Passes(self._wave, self._begins, self._device, key, rows, matrix_of_row, self._context)
                self.passes.append(passes)

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

        By a parameter's index, ``operands`` returns this rank's shards of the parameter and its gradient, and
        ``states`` the state of each slice.
        """
        self._row_moments = {
            (m.parameter.index, m.slice_index): states(m.parameter.index)[m.slice_index][ROW_MOMENTS]
            for m in self._wave
            if m.options.row_decay is not None and m.parameter.index in self._with_gradient
        }
        is_offloaded = any(moments.device != self._device for moments in self._row_moments.values())
        residency = self._context.residency
        self._transfers = residency.transfers(self._device, "state") if is_offloaded else None
        self._found_inf = scaling.found_inf
        for passes in self.passes:
            passes.update(watched, groups, scaling, operands)

    def begin(self) -> None:
        """Runs the kernels that update the momentum and write directions, and starts the all-to-all to the owners."""
        self._directions = torch.zeros(self._numel, dtype=torch.bfloat16, device=self._device)
        for in_buffer, stored in self._stored_row_moments(self._directions):
            in_buffer.copy_(stored, non_blocking=True)
        run_phases([passes.momentum_into(self._directions) for passes in self.passes], self.cuts)
        self._message = self._directions if self.ranks is None else self.ranks.to_group_device(self._directions)
        if self.ranks is not None and self._is_sharded:
            self._gathered = self._message.new_empty(sum(self._received))
            self._waits = [self.ranks.all_to_all(self._gathered, self._message, self._received, self._sent)]

    def orthogonalize(self) -> None:
        """Waits for the parts of this rank's matrices, orthogonalizes them, and starts to send the results back."""
        if self.ranks is not None and self._is_sharded:
            self._wait()
            for matrix, begins in self._owned:
                self._orthogonalize_parts(matrix, begins)
            self._waits = [self.ranks.all_to_all(self._message, self._gathered, self._sent, self._received)]
            return
        for m, begin in zip(self._wave, self._begins, strict=True):
            if m.owner == m.rank and (self.ranks is not None or m.parameter.index in self._with_gradient):
                row_moments = m.row_moments(self._message, begin, m.rank)
                _orthogonalize(m, self._message[begin : begin + m.numel], row_moments)
        for owner, chunk in enumerate(torch.split(self._message, self._sent)):
            if self.ranks is not None and chunk.numel():
                self._waits.append(self.ranks.broadcast(chunk, owner))

    def _orthogonalize_parts(self, matrix: Matrix, begins: list[int]) -> None:
        """Copies parts, gathered at index ``begins[rank]``, into a matrix, orthogonalizes it, and copies it back."""
        whole = self._gathered.new_empty(matrix.numel)
        row_moments = whole.new_zeros(matrix.rows, dtype=torch.float32)
        pairs = []  # of views of each part: in the whole matrix, and gathered
        senders = [rank for rank, sent_rows in enumerate(matrix.sent_rows) if sent_rows]
        gathered_moments = [matrix.row_moments(self._gathered, begins[rank], rank) for rank in senders]
        for begin, parts in zip(begins, matrix.parts, strict=True):
            for part in parts:
                in_whole = matrix.view_of_part(whole, part)
                pairs.append((in_whole, self._gathered[begin : begin + in_whole.numel()].view(in_whole.shape)))
                begin += in_whole.numel()
        for in_whole, gathered in pairs:
            in_whole.copy_(gathered)
        for moments in gathered_moments:  # zeros, of rows that a rank does not store or has never stepped
            torch.maximum(row_moments, moments, out=row_moments)
        _orthogonalize(matrix, whole, row_moments)
        for in_whole, gathered in pairs:
            gathered.copy_(in_whole)
        for moments in gathered_moments:
            moments.copy_(row_moments)

    def apply(self) -> None:
        """Waits for the orthogonalized directions, updates weights by them, and stores the second moments of rows.

        If a gradient scaler skips the step, the second moments stay unchanged. The host does not wait for copies to its
        memory.
        """
        self._wait()
        directions = self._directions
        if self._message is not directions:
            directions.copy_(self._message)
        self._directions = self._message = self._gathered = _NONE  # frees the buffers
        for passes in self.passes:
            passes.apply(directions)
        for in_buffer, stored in self._stored_row_moments(directions):
            if self._found_inf is not None:
                before = stored.to(in_buffer.device, non_blocking=True)
                in_buffer = torch.where(self._found_inf.to(in_buffer.device) > 0, before, in_buffer)
            stored.copy_(in_buffer, non_blocking=True)
        if self._transfers is not None:
            self._transfers.wait_for_current_stream()
        self._row_moments, self._found_inf, self._transfers = {}, None, None

    def _stored_row_moments(self, directions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of views of the second moments of rows that this rank stores: behind a direction, and in the state."""
        for matrix, begin in zip(self._wave, self._begins, strict=True):
            entry = self._row_moments.get((matrix.parameter.index, matrix.slice_index))
            if entry is not None:
                rows, stored = matrix.stored_row_moments(entry)
                yield matrix.row_moments(directions, begin, matrix.rank)[rows], stored

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

    NorMuon (Li et al., 2025, arXiv 2510.05491). The result, in float32, is rescaled to the norm of ``matrix``. All sums
    are of whole rows, in an order that depends on the matrix's shape alone.

    ``matrix`` is bfloat16. Updates ``row_moments`` (float32, ``(rows,)``), an average of each row's mean square over
    the steps, with the decay rate ``decay``.
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
        pipeline = list(of_ranks)
        for index in range(len(pipeline) + 2):
            if index < len(pipeline):
                pipeline[index].begin()
            if 1 <= index <= len(pipeline):
                pipeline[index - 1].orthogonalize()
            if index >= 2:
                pipeline[index - 2].apply()
