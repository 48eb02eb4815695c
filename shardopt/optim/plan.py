"""The tables of a step, made once and kept as long as what they were made of stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shardopt import _C
from shardopt.codec import CODECS
from shardopt.kernels.devices import make_call
from shardopt.kernels.dispatch import Call, LossScaling, Tables
from shardopt.kernels.skipped import SkippedElements
from shardopt.kernels.streamed import EXTENT, StreamedCall, StreamedTables
from shardopt.kernels.strided import StridedCall
from shardopt.layout import Shard, shard_of
from shardopt.optim import placement
from shardopt.optim.cut_blocks import CutBlocks, FlatCuts
from shardopt.optim.entries import Group, PlannedParameter
from shardopt.optim.placement import Offload, StatePlaces

_TABLES: list[Tensor | None] = [codec.table for codec in sorted(CODECS.values(), key=lambda codec: codec.index)]

#: Name, shard and this rank's part of the gradient of a parameter.
FiniteCheck = tuple[str, Shard, Tensor]


class FlatParameters(NamedTuple):
    """What an optimizer has under flat shards, of which every rank has to know.

    Attributes:
        cuts: the blocks that they cut, by device.
        without_gradient: their places among all parameters, with index of the param group, name, shard, and an empty
            tensor that stands for a gradient that only other ranks may have.
    """

    cuts: Mapping[torch.device, FlatCuts]
    without_gradient: Mapping[int, tuple[int, FiniteCheck]]


class Plan:
    """The tables for all parameters of an optimizer, and what is watched so that they never go stale.

    Parameters without a gradient keep their rows; a step selects those that have one. All gradients are looked up, and
    what the tables point to is compared with what stands there, in each step.

    Args:
        param_groups: the optimizer's.
        state: the optimizer's.
        groups: one per param group.
        planned: one per parameter, in the groups' order; None for one that is in no table.
        flat: what flat shards share.
        skipped: where skipped elements are counted.
        places: copies what does not live beside its parameter.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        state: Mapping[Tensor, Any],
        groups: list[Group],
        planned: Sequence[PlannedParameter | None],
        flat: FlatParameters,
        skipped: SkippedElements,
        places: StatePlaces,
    ) -> None:
        self.groups = groups
        self._planned = planned
        self._flat = flat
        self._gradients: list[Tensor | None] = []  # kept alive until the step is taken
        self._stepped: list[Tensor] = []  # the parameters that it changes
        shards = [None if p is None or p.spec.shard.plain else p.spec.shard for p in planned]
        names = [None if p is None else p.spec.state_names for p in planned]
        self._watch = _C.Watch(param_groups, state, shards, names, shard_of)
        by_device: dict[torch.device, list[tuple[int, PlannedParameter]]] = {device: [] for device in flat.cuts}
        for index, parameter in enumerate(planned):
            if parameter is not None:
                by_device.setdefault(parameter.device, []).append((index, parameter))
        self._devices = [
            _DeviceTables(device, found, flat.cuts.get(device) or FlatCuts([], device), skipped, places)
            for device, found in by_device.items()
        ]
        self._new_groups = True

    def options_changed(self, param_groups: list[dict[str, Any]]) -> bool:
        """Whether an option of a param group may have changed since the last call."""
        return self._watch.options_changed(param_groups)

    def set_groups(self, groups: list[Group]) -> bool:
        """Takes new options; False if they call for another plan."""
        same = [(g.rule, g.table_format) for g in groups] == [(g.rule, g.table_format) for g in self.groups]
        self.groups = groups
        self._new_groups = True
        return same

    def refresh(
        self,
        param_groups: list[dict[str, Any]],
        state: Mapping[Tensor, Any],
        local: Mapping[int, Tensor] | None = None,
    ) -> bool:
        """Looks up the gradients; False if the plan no longer fits parameters, state or gradients.

        Args:
            param_groups: the optimizer's.
            state: the optimizer's.
            local: this rank's parts of gradients of sharded parameters, by the parameters' places, if they are known.
        """
        found = self._watch.refresh(param_groups, state)
        if found is None:
            return False
        gradients, self._stepped, left = found
        self._gradients = gradients
        for index in left:
            gradient, parameter = gradients[index], self._planned[index]
            assert gradient is not None
            assert parameter is not None
            part = parameter.spec.shard.local_gradient(gradient) if local is None else local[index]
            if not self._watch.take(index, gradient, part):
                return False
            gradients[index] = part
        return True

    def gradients_of(self, nonfinite: str) -> list[FiniteCheck]:
        """Name, shard and this rank's part of the gradient of all parameters in groups with that ``nonfinite``."""
        if all(group.nonfinite != nonfinite for group in self.groups):
            return []
        found = {
            place: (parameter.group, (parameter.name, parameter.spec.shard, gradient))
            for place, (parameter, gradient) in enumerate(zip(self._planned, self._gradients, strict=True))
            if parameter is not None and gradient is not None
        }
        found = {**self._flat.without_gradient, **found}
        return [found[place][1] for place in sorted(found) if self.groups[found[place][0]].nonfinite == nonfinite]

    def prepare(self, param_groups: list[dict[str, Any]], scaling: LossScaling) -> None:
        """Fills in what is new in this step."""
        dtypes = self._watch.gradient_dtypes()
        groups = self.groups if self._new_groups else None
        for device in self._devices:
            device.prepare(self._watch, dtypes, groups, scaling)
            if device.strided:
                params = [param for group in param_groups for param in group["params"]]
                for index, call in device.strided_calls():
                    call.operands = self._operands(params, index)
                device.sort_strided()
        self._new_groups = False

    def run(self) -> None:
        """Carries out the step, in any thread.

        Raises:
            torch.OutOfMemoryError: there is no memory for a copy of what is not contiguous. Nothing was changed on the
                device that lacks it, where the largest copies come first, nor on those after it; devices before it, in
                the order of their first parameters, were stepped.
        """
        try:
            for device in self._devices:
                device.run()
        finally:
            for device in self._devices:
                for _, call in device.strided_calls():
                    call.operands = None
        increment_version(self._stepped)  # a graph that has saved their old values is to notice
        self._gradients, self._stepped = [], []

    def _operands(self, params: Sequence[Tensor], index: int) -> tuple[Tensor, Tensor]:
        """This rank's parts of a parameter and its gradient."""
        parameter, gradient = self._planned[index], self._gradients[index]
        assert parameter is not None
        assert gradient is not None
        return parameter.spec.shard.local(params[index]), gradient


class _Rows:
    """The rows of parameters of which the same is offloaded, and the call with those of them that have a gradient."""

    def __init__(self, device: torch.device, offload: Offload, planned: list[tuple[int, PlannedParameter]]) -> None:
        self._device = device
        self._offload = offload
        self.kernels = torch.device("cpu") if offload == "step" else device
        self._planned = planned
        self._all_entries = np.array([row for _, p in planned for row in p.rows], dtype=_C.tensor_entry)
        self._all_extents = np.array([row for _, p in planned for row in p.extents], dtype=EXTENT)
        self._all_parameters = np.array([i for i, p in planned for _ in p.rows], dtype=np.int64)
        self._all_first_elements = np.array([first for _, p in planned for first in p.first_elements], dtype=np.int64)
        pieces = [(i, piece) for i, p in planned for piece in p.pieces]
        self._all_pieces = np.array([now != last for now, last in zip(pieces, [None, *pieces], strict=False)]).cumsum()
        self.planned: list[PlannedParameter] = []
        self.call: Call | None = None

    def select(self, has_gradient: npt.NDArray[np.bool_]) -> None:
        """Makes the tables of the parameters that have a gradient."""
        rows = has_gradient[self._all_parameters]
        self._selected = rows
        self._parameters = self._all_parameters[rows]
        self._first_elements = self._all_first_elements[rows]
        self.planned = [p for i, p in self._planned if has_gradient[i]]
        self._tables = Tables(self._all_entries[rows], [p.step for p in self.planned], _TABLES)
        self.call = None

    def prepare(
        self,
        watch: _C.Watch,
        groups: npt.NDArray[np.void],
        scaling: LossScaling,
        skipped: SkippedElements,
        places: StatePlaces,
    ) -> None:
        """Fills in what is new in this step."""
        if not self.planned:
            return
        changed = watch.fill(self._tables.entries, self._parameters, self._first_elements)
        if self.call is None:
            self.call = self._make_call(places)
            skipped.add(self.call, self.kernels)
            changed = True
        self.call.update(changed, groups, scaling)

    def _make_call(self, places: StatePlaces) -> Call:
        if self._offload is None:
            return make_call(self._device, self._tables)
        pieces = self._all_pieces[self._selected]
        streamed = StreamedTables(self._tables, self._all_extents[self._selected], pieces)
        transfers = places.transfers(self._device, self._offload)
        return StreamedCall(
            streamed, placement.MOVES[self._offload], transfers, placement.CHUNK_BYTES, partial(make_call, self.kernels)
        )


class _StridedRows(_Rows):
    """The rows of one parameter that is not contiguous, or whose gradient is not."""

    def _make_call(self, places: StatePlaces) -> Call:
        return StridedCall(self._tables, self._first_elements, super()._make_call(places))


class _DeviceTables:
    """The rows of all parameters on one device."""

    def __init__(
        self,
        device: torch.device,
        planned: list[tuple[int, PlannedParameter]],
        flat_cuts: FlatCuts,
        skipped: SkippedElements,
        places: StatePlaces,
    ) -> None:
        self._device = device
        self._planned = planned
        self._flat_cuts = flat_cuts
        self._skipped = skipped
        self._places = places
        by_offload: dict[Offload, list[tuple[int, PlannedParameter]]] = {}
        for index, parameter in planned:
            by_offload.setdefault(parameter.offload, []).append((index, parameter))
        self._rows = [_Rows(device, offload, found) for offload, found in by_offload.items()]
        self.strided: dict[int, _StridedRows] = {}  # by the parameter's place
        self._lr: dict[int, Tensor] = {}  # by group: float32, where the learning rate is on a device
        self._groups: dict[torch.device, npt.NDArray[np.void]] = {}  # by the kernels' device
        self._dtypes: bytes | None = None
        self._select(bytes([_C.Watch.no_gradient]) * (1 + max((index for index, _ in planned), default=-1)))

    def prepare(self, watch: _C.Watch, dtypes: bytes, groups: Sequence[Group] | None, scaling: LossScaling) -> None:
        """Fills in what is new in this step.

        Args:
            watch: knows the gradients.
            dtypes: the gradients' dtypes, which also say what parameters have one.
            groups: the param groups; None where they are as before.
            scaling: the loss scale.
        """
        if groups is not None:
            for kernels in {rows.kernels for rows in self._rows}:
                found = [group.row(*self._learning_rate(kernels, index, group)) for index, group in enumerate(groups)]
                self._groups[kernels] = np.array(found, dtype=_C.group_entry)
        if dtypes != self._dtypes:
            self._select(dtypes)
        for rows in [*self._rows, *self.strided.values()]:
            rows.prepare(watch, self._groups[rows.kernels], scaling, self._skipped, self._places)

    def strided_calls(self) -> Iterator[tuple[int, StridedCall]]:
        """The calls that step a parameter each, by the parameters' places."""
        for index, rows in self.strided.items():
            assert isinstance(rows.call, StridedCall)
            yield index, rows.call

    def sort_strided(self) -> None:
        """Puts the largest copies first: where there is no memory for them, nothing was changed."""
        needed = {index: call.copied_bytes for index, call in self.strided_calls()}
        self.strided = {i: self.strided[i] for i in sorted(needed, key=needed.__getitem__, reverse=True)}

    def run(self) -> None:
        """Runs all phases of the step."""
        for call in self._calls():
            self._skipped.keep_if_captured(call, (self._lr, self._cut))
        self._cut.clear_extremes()
        self._run(_C.Phase.step)
        if self._cut:
            self._cut.exchange_extremes()
            if self._cut.relative:
                self._run(_C.Phase.relative)
                self._cut.exchange_extremes()
            self._run(_C.Phase.finish)
            self._cut.share_scales()

    def _calls(self) -> list[Call]:
        """The calls of a step, strided parameters first; empty where only other ranks have something to step."""
        return [rows.call for rows in [*self.strided.values(), *self._rows] if rows.call is not None]

    def _run(self, phase: _C.Phase) -> None:
        for call in self._calls():
            call.run(phase)

    def _select(self, dtypes: bytes) -> None:
        """Makes the tables of the parameters that have a gradient."""
        self._skipped.retire(self._calls())
        found = np.frombuffer(dtypes, dtype=np.uint8)
        has_gradient = found != _C.Watch.no_gradient
        strided = has_gradient & (found & _C.Watch.strided > 0)
        self.strided = {i: _StridedRows(self._device, p.offload, [(i, p)]) for i, p in self._planned if strided[i]}
        for rows in self._rows:
            rows.select(has_gradient & ~strided)
        for rows in self.strided.values():
            rows.select(strided)
        # In the parameters' order, which is the same on all ranks: what is strided may not be.
        cuts = [p.cut for i, p in self._planned if has_gradient[i] and p.cut is not None]
        self._cut = CutBlocks(cuts, self._flat_cuts)
        self._dtypes = dtypes

    def _learning_rate(self, kernels: torch.device, index: int, group: Group) -> tuple[float | None, Tensor | None]:
        """Where a group's learning rate is on a device: its value for the CPU, else a buffer beside the parameters."""
        if group.lr is None:
            return None, None
        if kernels.type == "cpu":
            return float(group.lr), None
        if index not in self._lr:
            self._lr[index] = torch.zeros((), dtype=torch.float32, device=self._device)
        return None, self._lr[index].copy_(group.lr.reshape(()))  # in the order of the stream, never read here
