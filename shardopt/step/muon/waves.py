"""The part of a step that moves parameters by orthogonalized directions: its passes, wave by wave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import Call, LossScaling
from shardopt.kernels.transfers_cuda import CudaTransfers
from shardopt.layout import FlatShard
from shardopt.step.batch import StepContext, run_phases
from shardopt.step.cut_blocks import CutBlocks, CutParameter, FlatCuts
from shardopt.step.group_tables import GroupTables
from shardopt.step.inputs import Input
from shardopt.step.muon.directions import Directions, RowMoments
from shardopt.step.muon.matrices import Matrix, Wave, matrices_of, waves_of
from shardopt.step.muon.passes import Alike, Operands, Passes
from shardopt.step.rows import ROW, Group


class _Planned:
    """A wave with the cut blocks of flat shards, rows, and their matrices, which do not change from step to step."""

    def __init__(self, wave: Wave, flat_cuts: FlatCuts, context: StepContext) -> None:
        self.wave, self.flat_cuts, self._context = wave, flat_cuts, context
        self.rows, self.places = np.zeros(0, ROW), np.zeros(0, np.int64)

    def take_rows(self, table: npt.NDArray[np.void]) -> None:
        """Takes the wave's rows from a table."""
        tensors, elements = table["tensor"], table["element"]
        places = np.full(len(table), -1)
        for place, matrix in enumerate(self.wave.matrices):
            end = matrix.first + matrix.held.numel
            places[(tensors == matrix.tensor) & (elements >= matrix.first) & (elements < end)] = place
        self.rows, self.places = table[places >= 0], places[places >= 0]

    def step(
        self, device: torch.device, stepped: Mapping[Alike, Sequence[int]], cuts: Mapping[int, CutParameter]
    ) -> WaveStep:
        """The wave's step; see :meth:`Waves.steps`."""
        tensors = {matrix.tensor for matrix in self.wave.matrices}
        blocks = CutBlocks([cut for index, cut in cuts.items() if index in tensors], self.flat_cuts)
        passes = {}
        for key, indices in stepped.items():
            chosen = np.isin(self.rows["tensor"], indices)
            if chosen.any():
                passes[key] = self.rows[chosen], self.places[chosen]
        normalized = {(m.tensor, m.part) for m in self.wave.matrices if m.row_decay is not None}
        with_gradient = {index for indices in stepped.values() for index in indices}
        of_rows = [(tensor, part) for tensor, part in sorted(normalized) if tensor in with_gradient]
        return WaveStep(self.wave, device, passes, blocks, of_rows, self._context)


class Waves:
    """The waves of a step, and the rows of their parameters.

    Args:
        inputs: all parameters of the step.
        groups: one per param group.
        context: of the step.
        by_number: whether the matrices' owners depend on the parameters' numbers; see :func:`waves_of`.
    """

    def __init__(
        self, inputs: Sequence[Input], groups: Sequence[Group], context: StepContext, *, by_number: bool
    ) -> None:
        by_device: dict[torch.device, list[Matrix]] = {}
        memory = []
        for index, parameter in enumerate(inputs):
            orthogonalized = groups[parameter.group].rule.orthogonalized
            if orthogonalized is not None and parameter.spec is not None:
                by_device.setdefault(parameter.device, []).extend(matrices_of(index, parameter, orthogonalized))
                memory.append(orthogonalized.memory)
        self._waves: dict[torch.device, list[_Planned]] = {}
        # By the indices of parameter and slice: offsets of its matrices in the local tensor, and its cut blocks.
        self._begins: dict[tuple[int, int], list[int]] = {}
        self._cuts: dict[tuple[int, int], FlatCuts] = {}
        for device, matrices in by_device.items():
            for matrix in matrices:
                self._begins.setdefault((matrix.tensor, matrix.part), []).append(matrix.first)
            for wave in waves_of(matrices, min(memory), device.type, by_number=by_number):
                slices = {(m.tensor, m.part): m.spec for m in wave.matrices}
                flat = [spec for spec in slices.values() if isinstance(spec.shard, FlatShard)]
                planned = _Planned(wave, FlatCuts(flat, device), context)
                self._waves.setdefault(device, []).append(planned)
                self._cuts.update(dict.fromkeys(slices, planned.flat_cuts))

    def has(self, index: int) -> bool:
        """Whether a parameter is stepped in waves."""
        return (index, 0) in self._cuts

    def cuts_of(self, index: int, part: int) -> FlatCuts | None:
        """The cut blocks that are exchanged together with a slice's cut blocks."""
        return self._cuts.get((index, part))

    def begins_in(self, index: int, part: int) -> Sequence[int]:
        """The elements of a parameter's slice that begin a matrix, except the first one."""
        first, *others = self._begins.get((index, part), [0])
        return [begin - first for begin in others]

    def take_rows(self, table: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Keeps the rows of parameters that are stepped in waves; returns the others."""
        for planned in (p for of_device in self._waves.values() for p in of_device):
            planned.take_rows(table)
        return table[~np.isin(table["tensor"], [tensor for tensor, _ in self._cuts])]

    def steps(
        self, device: torch.device, stepped: Mapping[Alike, Sequence[int]], cuts: Mapping[int, CutParameter]
    ) -> list[WaveStep]:
        """The steps of a device's waves.

        Args:
            device: the parameters' device.
            stepped: the indices of the parameters with a gradient.
            cuts: the parameters with column shards that cut blocks.
        """
        return [planned.step(device, stepped, cuts) for planned in self._waves.get(device, [])]


class WaveStep:
    """The step of the parameters of one wave that have a gradient.

    Args:
        wave: the matrices, including those of parameters without a gradient.
        device: the parameters' device.
        rows: rows of :data:`shardopt.step.rows.ROW`, and the place in the wave of each row's matrix.
        cuts: the blocks that ranks share.
        normalized: the indices of parameters with a gradient, and of their slices, with second moments of rows.
        context: of the step.

    Attributes:
        cuts: see above.
        ranks: the ranks that share the matrices; None for matrices of this rank alone.
    """

    def __init__(
        self,
        wave: Wave,
        device: torch.device,
        rows: Mapping[Alike, tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]],
        cuts: CutBlocks,
        normalized: Sequence[tuple[int, int]],
        context: StepContext,
    ) -> None:
        self._normalized = normalized
        self._row_moments: RowMoments = {}
        self._found_inf: Tensor | None = None
        self._device, self._residency = device, context.residency
        self._transfers: CudaTransfers | None = None  # of the second moments of rows, where they are offloaded
        self._directions = Directions(wave, device)
        self.cuts = cuts
        self.ranks = None if wave.division is None else wave.division.ranks
        self._passes = [Passes(wave, self._directions, device, key, *some, context) for key, some in rows.items()]
        self._stepped = {index for passes in self._passes for index in passes.tensors}

    @property
    def calls(self) -> list[Call]:
        """The kernels' calls that were made so far."""
        return [call for passes in self._passes for call in passes.calls]

    @property
    def communicates(self) -> bool:
        """Whether the step takes collectives."""
        return self.ranks is not None or bool(self.cuts)

    @property
    def memory(self) -> list[Tensor]:
        """Tensors that live from step to step and are no state."""
        return list(self.cuts.memory)

    def update(
        self,
        watched: _C.Inputs,
        groups: GroupTables,
        scaling: LossScaling,
        operands: Operands,
        row_moments: Callable[[int, int], Tensor],
    ) -> None:
        """Takes the gradients, options and second moments of rows of a step."""
        self._row_moments = {indices: row_moments(*indices) for indices in self._normalized}
        is_offloaded = any(moments.device != self._device for moments in self._row_moments.values())
        self._transfers = self._residency.transfers(self._device, "state") if is_offloaded else None
        self._found_inf = scaling.found_inf
        for passes in self._passes:
            passes.update(watched, groups, scaling, operands)

    def begin(self) -> None:
        """Takes the momentum's pass over this rank's elements, and begins to send the directions."""
        memory = self._directions.begin(self._row_moments)
        run_phases([passes.momentum_into(memory) for passes in self._passes], self.cuts)
        self._directions.send()

    def orthogonalize(self) -> None:
        """Orthogonalizes the matrices that this rank owns, and begins to send them back."""
        self._directions.orthogonalize(self._stepped)

    def apply(self) -> None:
        """Receives the directions, and takes the parameters' pass."""
        directions = self._directions.receive()
        for passes in self._passes:
            passes.apply(directions)
        self._directions.keep(self._row_moments, directions, self._found_inf)
        if self._transfers is not None:
            self._transfers.follow()
        self._row_moments, self._found_inf, self._transfers = {}, None, None


def run_waves(waves: Sequence[WaveStep]) -> None:
    """Takes the steps of all waves of a device, one set of ranks after the other.

    A rank that waits for a wave to return may be the one that has to begin a wave with ranks of another set.
    """
    for _, alike in groupby(waves, key=lambda wave: wave.ranks):
        _run_in_turn(list(alike))


def _run_in_turn(waves: Sequence[WaveStep]) -> None:
    """While one wave is computed, the next arrives, and the last returns."""
    for number in range(len(waves) + 2):
        if number < len(waves):
            waves[number].begin()
        if 1 <= number <= len(waves):
            waves[number - 1].orthogonalize()
        if number >= 2:
            waves[number - 2].apply()
