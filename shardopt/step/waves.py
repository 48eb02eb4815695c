"""The part of a step that moves parameters by orthogonalized directions: its passes, wave by wave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import DTYPES, Call, LossScaling
from shardopt.kernels.skipped import SkippedElements
from shardopt.kernels.weights import WeightFormat
from shardopt.layout import FlatShard
from shardopt.state.residency import Offload, StateResidency
from shardopt.step.batch import Batch, run_phases
from shardopt.step.cut_blocks import CutBlocks, CutParameter, FlatCuts
from shardopt.step.directions import Directions
from shardopt.step.group_tables import GroupTables, Scaled
from shardopt.step.inputs import Input
from shardopt.step.matrices import BYTES, Matrix, Wave, matrices_of, waves_of
from shardopt.step.rows import ROW, Group, table_of

_DIRECTION = WeightFormat(torch.bfloat16)

#: This rank's parts of a parameter and its gradient, by the parameter's index.
Operands = Callable[[int], tuple[Tensor, Tensor]]


#: What is copied for the step of some parameters, and the index of the only one if it is not contiguous.
Alike = tuple[Offload, int | None]


class _Planned:
    """A wave with what does not change from step to step: the cut blocks of flat shards, rows, and their matrices."""

    def __init__(self, wave: Wave, flat_cuts: FlatCuts) -> None:
        self.wave, self.flat_cuts = wave, flat_cuts
        self.rows, self.places = table_of([], ROW), np.zeros(0, np.int64)

    def take_rows(self, table: npt.NDArray[np.void]) -> None:
        """Takes its rows from a table."""
        tensors, elements = table["tensor"], table["element"]
        places = np.full(len(table), -1)
        for place, matrix in enumerate(self.wave.matrices):
            end = matrix.first + matrix.held.numel
            places[(tensors == matrix.tensor) & (elements >= matrix.first) & (elements < end)] = place
        self.rows, self.places = table[places >= 0], places[places >= 0]

    def step(
        self, device: torch.device, stepped: Mapping[Alike, Sequence[int]], cuts: Mapping[int, CutParameter]
    ) -> WaveStep:
        """The step of these parameters; see :meth:`Waves.steps`."""
        tensors = {matrix.tensor for matrix in self.wave.matrices}
        blocks = CutBlocks([cut for index, cut in cuts.items() if index in tensors], self.flat_cuts)
        passes = {}
        for key, indices in stepped.items():
            chosen = np.isin(self.rows["tensor"], indices)
            if chosen.any():
                passes[key] = self.rows[chosen], self.places[chosen]
        return WaveStep(self.wave, device, passes, blocks)


class Waves:
    """The waves of a step, and the rows of their parameters.

    Args:
        inputs: all parameters of the step.
        groups: one per param group.
    """

    def __init__(self, inputs: Sequence[Input], groups: Sequence[Group]) -> None:
        by_device: dict[torch.device, list[Matrix]] = {}
        memory = []
        for index, parameter in enumerate(inputs):
            orthogonalized = groups[parameter.group].rule.orthogonalized
            if orthogonalized is not None and parameter.spec is not None:
                by_device.setdefault(parameter.device, []).extend(matrices_of(index, parameter, orthogonalized))
                memory.append(orthogonalized.memory)
        self._waves: dict[torch.device, list[_Planned]] = {}
        # By the indices of parameter and slice: where its matrices begin in the local tensor, and its cut blocks.
        self._begins: dict[tuple[int, int], list[int]] = {}
        self._cuts: dict[tuple[int, int], FlatCuts] = {}
        for device, matrices in by_device.items():
            for matrix in matrices:
                self._begins.setdefault((matrix.tensor, matrix.part), []).append(matrix.first)
            for wave in waves_of(matrices, min(memory), device.type):
                slices = {(m.tensor, m.part): m.spec for m in wave.matrices}
                flat = [spec for spec in slices.values() if isinstance(spec.shard, FlatShard)]
                planned = _Planned(wave, FlatCuts(flat, device))
                self._waves.setdefault(device, []).append(planned)
                self._cuts.update(dict.fromkeys(slices, planned.flat_cuts))

    @property
    def devices(self) -> Iterable[torch.device]:
        """The devices that have waves."""
        return self._waves.keys()

    def has(self, index: int) -> bool:
        """Whether a parameter is stepped in waves."""
        return (index, 0) in self._cuts

    def cuts_of(self, index: int, part: int) -> FlatCuts | None:
        """The cut blocks that are exchanged together with those of a parameter's slice."""
        return self._cuts.get((index, part))

    def begins_in(self, index: int, part: int) -> Sequence[int]:
        """The elements of a parameter's slice that begin a matrix, but for its first one."""
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
            device: of the parameters.
            stepped: the indices of the parameters with a gradient.
            cuts: what the owners of their blocks exchange, where column shards cut blocks.
        """
        return [planned.step(device, stepped, cuts) for planned in self._waves.get(device, [])]


class WaveStep:
    """The step of the parameters of one wave that have a gradient.

    Args:
        wave: the matrices, also those of parameters that have none.
        device: of the parameters.
        rows: of :data:`shardopt.step.rows.ROW`, and the place in the wave of each row's matrix.
        cuts: the blocks that ranks share.
    """

    def __init__(
        self,
        wave: Wave,
        device: torch.device,
        rows: Mapping[Alike, tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]],
        cuts: CutBlocks,
    ) -> None:
        self._directions = Directions(wave, device)
        self._cuts = cuts
        self._passes = [_Passes(wave, self._directions, device, key, *of_key) for key, of_key in rows.items()]
        self._stepped = {index for passes in self._passes for index in passes.tensors}

    @property
    def calls(self) -> list[Call]:
        """The kernels' calls that were made so far."""
        return [call for passes in self._passes for call in passes.calls]

    @property
    def communicates(self) -> bool:
        """Whether other ranks take part."""
        return self._directions.communicates or bool(self._cuts)

    def update(
        self, watched: _C.Inputs, groups: GroupTables, scaling: LossScaling, skipped: SkippedElements,
        residency: StateResidency, operands: Operands,
    ) -> None:  # fmt: skip
        """Takes the gradients and options of a step."""
        for passes in self._passes:
            passes.update(watched, groups, scaling, skipped, residency, operands)

    def begin(self) -> None:
        """The momentum's pass over this rank's elements; the directions begin to travel."""
        memory = self._directions.begin()
        run_phases([passes.momentum_into(memory) for passes in self._passes], self._cuts)
        self._directions.send()

    def orthogonalize(self) -> None:
        """The matrices that this rank owns; they begin to travel back."""
        self._directions.orthogonalize(self._stepped)

    def apply(self) -> None:
        """The parameters' pass."""
        directions = self._directions.receive()
        for passes in self._passes:
            passes.apply(directions)


class _Passes:
    """Both passes over some rows of a wave; the arguments are those of :class:`WaveStep`."""

    def __init__(
        self,
        wave: Wave,
        directions: Directions,
        device: torch.device,
        key: Alike,
        rows: npt.NDArray[np.void],
        matrices: npt.NDArray[np.int64],
    ) -> None:
        offload, self._strided = key
        moved = np.array([first - m.first for first, m in zip(directions.first, wave.matrices, strict=True)])
        self._offsets = (BYTES * (rows["element"] + moved[matrices])).astype(np.uint64)
        scaled = [Scaled(wave.matrices[index].group, wave.matrices[index].scale) for index in matrices.tolist()]
        self._scaled = tuple(dict.fromkeys(scaled))
        momentum, apply = rows.copy(), rows.copy()
        momentum["entry"]["low_bits"] = momentum["extent"]["low_bits"] = 0
        momentum["entry"]["weight_format"] = _DIRECTION.index
        for field in ("codes", "scales"):
            apply["entry"][field] = apply["extent"][field] = 0
        apply["entry"]["extremes"] = apply["entry"]["cut"] = 0
        apply["entry"]["gradient_dtype"] = DTYPES[torch.bfloat16]
        apply["entry"]["group"] = [self._scaled.index(one) for one in scaled]
        self.tensors = set(rows["tensor"].tolist())
        self._device = device
        self._operands: tuple[Tensor, Tensor] | None = None
        self._gradient: Tensor | None = None
        self._momentum = Batch(device, offload, momentum, [], None)
        self._apply = Batch(device, offload if apply["entry"]["low_bits"].any() else None, apply, [], None)

    @property
    def calls(self) -> list[Call]:
        """The kernels' calls that were made so far."""
        return [batch.call for batch in (self._momentum, self._apply) if batch.call is not None]

    def update(
        self,
        watched: _C.Inputs,
        groups: GroupTables,
        scaling: LossScaling,
        skipped: SkippedElements,
        residency: StateResidency,
        operands: Operands,
    ) -> None:
        """Takes the gradients and options of a step. The first time, takes the memory that the calls need."""
        of_momentum = groups.on(self._device, self._momentum.kernels)
        of_apply = groups.on(self._device, self._apply.kernels, self._scaled)
        self._prepare_momentum = partial(
            self._momentum.update, groups=of_momentum, scaling=scaling, skipped=skipped, residency=residency
        )
        self._prepare_apply = partial(
            self._apply.update,
            groups=of_apply,
            scaling=scaling._replace(grad_scale=None),
            skipped=skipped,
            residency=residency,
        )
        self._operands = None if self._strided is None else operands(self._strided)
        self._new_gradients = self._momentum.fill(watched)
        if self._momentum.call is None:
            self._prepare_momentum(True)
            self._prepare_apply(True)

    def momentum_into(self, memory: Tensor) -> Call:
        """The call of the momentum's pass, which writes its directions to memory."""
        entries = self._momentum.tables.entries
        changed = self._new_gradients | _point(entries["param"], memory, self._offsets)
        if self._operands is not None:
            _, gradient = self._operands
            self._gradient = gradient.resolve_neg().contiguous()
            in_gradient = (self._momentum.elements * gradient.itemsize).astype(np.uint64)
            changed |= _point(entries["gradient"], self._gradient, in_gradient)
        self._prepare_momentum(changed)
        assert self._momentum.call is not None
        return self._momentum.call

    def apply(self, directions: Tensor) -> None:
        """The pass over the parameters."""
        entries = self._apply.tables.entries
        changed = _point(entries["gradient"], directions, self._offsets)
        if self._operands is not None:
            param = self._operands[0].detach()
            copy = param.contiguous()
            changed |= _point(entries["param"], copy, (self._apply.elements * copy.itemsize).astype(np.uint64))
        self._prepare_apply(changed)
        assert self._apply.call is not None
        self._apply.call.run(_C.Phase.step)
        if self._operands is not None and copy is not param:
            param.copy_(copy)
        self._operands = self._gradient = None


def _point(addresses: npt.NDArray[np.uint64], tensor: Tensor, offsets: npt.NDArray[np.uint64]) -> bool:
    """Puts the addresses of a tensor's elements into a column of a table; returns whether they are new.

    Args:
        addresses: the column.
        tensor: contiguous.
        offsets: of the elements, in bytes.
    """
    new = np.uint64(tensor.data_ptr()) + offsets
    if np.array_equal(addresses, new):
        return False
    addresses[...] = new
    return True


def run_waves(waves: Sequence[WaveStep]) -> None:
    """Takes the steps of all waves of a device: while one is computed, the next travels, and the last one returns."""
    for number in range(len(waves) + 2):
        if number < len(waves):
            waves[number].begin()
        if 1 <= number <= len(waves):
            waves[number - 1].orthogonalize()
        if number >= 2:
            waves[number - 2].apply()
