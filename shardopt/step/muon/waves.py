"""The part of a step that moves parameters by orthogonalized directions: its passes, wave by wave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

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
from shardopt.step.muon.directions import Directions, RowMoments
from shardopt.step.muon.matrices import Matrix, Wave, matrices_of, waves_of
from shardopt.step.muon.passes import Operands, Passes
from shardopt.step.rows import ROW


def wave_steps(
    inputs: Sequence[Input], groups: Sequence[Group], context: StepContext, *, by_number: bool
) -> dict[torch.device, list[WaveStep]]:
    """The waves of a step, by device. Inputs get to know where their matrices begin.

    Args:
        inputs: all parameters of the step.
        groups: one per param group.
        context: the optimizer.
        by_number: whether the matrices' owners depend on the parameters' numbers; see :func:`waves_of`.
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
            parameter = inputs[matrix.tensor]
            parameter.begins.setdefault(matrix.part, []).append(matrix.first - parameter.slices[matrix.part].offset)
        divided = waves_of(matrices, min(memory), device.type, by_number=by_number)
        waves[device] = [WaveStep(wave, device, context) for wave in divided]
    return waves


class WaveStep:
    """The step of the parameters of one wave.

    Args:
        wave: the matrices, including those of parameters without a gradient.
        device: the parameters' device.
        context: the optimizer.

    Attributes:
        tensors: the indices of the parameters.
        cuts: the blocks that ranks share.
        ranks: the ranks that share the matrices; None for matrices of this rank alone.
        passes: the kernels' passes over the parameters that have a gradient.
    """

    def __init__(self, wave: Wave, device: torch.device, context: StepContext) -> None:
        self._wave, self._device, self._context = wave, device, context
        self.ranks = None if wave.division is None else wave.division.ranks
        self.tensors = {matrix.tensor for matrix in wave.matrices}
        self.cuts = CutBlocks({(m.tensor, m.part): m.spec for m in wave.matrices}.values(), device)
        self.passes: list[Passes] = []
        self._rows, self._places = np.zeros(0, ROW), np.zeros(0, np.int64)  # and each row's matrix
        self._directions = Directions(wave, device)
        self._with_gradient: frozenset[int] = frozenset()
        self._row_moments: RowMoments = {}
        self._found_inf: Tensor | None = None
        self._transfers: CudaTransfers | None = None  # of the second moments of rows, where they are offloaded

    def take_rows(self, table: npt.NDArray[np.void]) -> None:
        """Takes the wave's rows from a table of all rows."""
        tensors, elements = table["tensor"], table["element"]
        places = np.full(len(table), -1)
        for place, matrix in enumerate(self._wave.matrices):
            end = matrix.first + matrix.held.numel
            places[(tensors == matrix.tensor) & (elements >= matrix.first) & (elements < end)] = place
        self._rows, self._places = table[places >= 0], places[places >= 0]

    def select(self, stepped: Mapping[Alike, Sequence[Input]]) -> None:
        """Takes the parameters that have a gradient."""
        self._with_gradient = frozenset(parameter.index for alike in stepped.values() for parameter in alike)
        self.passes = []
        for key, alike in stepped.items():
            chosen = np.isin(self._rows["tensor"], [parameter.index for parameter in alike])
            if chosen.any():
                places = self._places[chosen]
                self.passes.append(
                    Passes(self._wave, self._directions, self._device, key, self._rows[chosen], places, self._context)
                )

    @property
    def communicates(self) -> bool:
        """Whether the step takes collectives."""
        return self.ranks is not None or bool(self.cuts)

    def update(
        self,
        watched: _C.Inputs,
        groups: GroupTables,
        scaling: LossScaling,
        operands: Operands,
        states: Callable[[int], Sequence[StateDict]],
    ) -> None:
        """Takes the gradients and options of a step.

        Args:
            watched: the gradients.
            groups: the options.
            scaling: the loss scale.
            operands: gives this rank's parts of a parameter and its gradient.
            states: gives the states of a parameter's slices.
        """
        self._row_moments = {
            (m.tensor, m.part): states(m.tensor)[m.part][ROW_MOMENTS]
            for m in self._wave.matrices
            if m.row_decay is not None and m.tensor in self._with_gradient
        }
        is_offloaded = any(moments.device != self._device for moments in self._row_moments.values())
        residency = self._context.residency
        self._transfers = residency.transfers(self._device, "state") if is_offloaded else None
        self._found_inf = scaling.found_inf
        for passes in self.passes:
            passes.update(watched, groups, scaling, operands)

    def begin(self) -> None:
        """Takes the momentum's pass over this rank's elements, and begins to send the directions."""
        memory = self._directions.begin(self._row_moments)
        run_phases([passes.momentum_into(memory) for passes in self.passes], self.cuts)
        self._directions.send()

    def orthogonalize(self) -> None:
        """Orthogonalizes the matrices that this rank owns, and begins to send them back."""
        self._directions.orthogonalize(self._with_gradient)

    def apply(self) -> None:
        """Receives the directions, and takes the parameters' pass."""
        directions = self._directions.receive()
        for passes in self.passes:
            passes.apply(directions)
        self._directions.keep(self._row_moments, directions, self._found_inf)
        if self._transfers is not None:
            self._transfers.follow()
        self._row_moments, self._found_inf, self._transfers = {}, None, None


def run_waves(waves: Sequence[WaveStep]) -> None:
    """Takes the steps of all waves of a device, one set of ranks after the other.

    A rank that waits for a wave to return may be the one that has to begin a wave with ranks of another set. While one
    wave is computed, the next arrives, and the last returns.
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
