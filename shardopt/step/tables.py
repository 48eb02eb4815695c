"""Cached kernel tables, the check that decides when to rebuild them, and a step's run through devices and phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from shardopt.kernels.dispatch import Call, LossScaling, Tables, check_sign, check_storage
from shardopt.kernels.skipped import SkippedElements
from shardopt.kernels.streamed import StreamedCall, StreamedTables
from shardopt.kernels.strided import StridedCall
from shardopt.layout import Shard, shard_of
from shardopt.state import residency as residencies
from shardopt.state.residency import Offload, StateResidency
from shardopt.state.slice_state import SliceState
from shardopt.state.tensor_state import flat_slices
from shardopt.step.cut_blocks import CutBlocks, CutParameter, FlatCuts
from shardopt.step.exact_sums import ExactSums, Summed, TakeTotals, total_of
from shardopt.step.inputs import Input, ParamGroups, check_tensors, demand_finite, local_gradients
from shardopt.step.rows import ROW, Group, Row, rows_of, table_of

_CODEC_TABLES: list[Tensor | None] = [codec.table for codec in sorted(CODECS.values(), key=lambda codec: codec.index)]

_CPU = torch.device("cpu")


class StepTables:
    """The tables of a step, kept as long as ``_C.Inputs`` finds what they point to unchanged.

    Parameters without a gradient have rows, too: each step runs the rows of those that have one.

    Args:
        param_groups: the optimizer's.
        state: the optimizer's; parameters that are stepped for the first time get theirs here.
        groups: one per param group.
        inputs: one per parameter.
        scaling: the loss scale.
        skipped: counts skipped elements.
        residency: where the state of each parameter lives.
        take_totals: takes the sums over all parameters, for rules with some.

    Raises:
        RuntimeError: the kernels cannot step a parameter, gradient or state. Nothing was changed.
        FloatingPointError: a gradient is NaN or Inf and ``nonfinite="raise"``. Nothing was changed.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        state: Any,
        groups: list[Group],
        inputs: Sequence[Input],
        scaling: LossScaling,
        skipped: SkippedElements,
        residency: StateResidency,
        take_totals: TakeTotals,
    ) -> None:
        self.groups = groups
        self._scaling, self._take_totals = scaling, take_totals
        self._from_totals = [dict[str, float]() for _ in groups]
        self._inputs, self._skipped, self._residency = inputs, skipped, residency
        params = [param for group in param_groups for param in group["params"]]
        self._gradients: list[Tensor | None] = local_gradients(params, inputs)  # kept alive until the step is taken
        self._stepped: list[Tensor] = []  # the parameters that the step changes
        if scaling.found_inf is None:
            demand_finite(inputs, self._gradients, groups)
        self._flat_cuts = _flat_cuts(inputs)
        self._sums = self._exact_sums(params)
        self._members: dict[int, _Member] = {}  # by the parameters' indices
        rows: list[Row] = []
        for index, param in enumerate(params):
            rows += self._rows_of(index, param, state, param_groups[inputs[index].group])
        self._table = table_of(rows, ROW)
        skipped.retire()
        shards = [None if p.spec is None or _is_fixed(p.shard) else p.shard for p in inputs]
        names = [p.spec.state_names if p.spec and i in self._members else None for i, p in enumerate(inputs)]
        self._watched = _C.Inputs(list(param_groups), state, shards, names, shard_of)
        self._new_groups = True
        self._kinds: bytes | None = None  # of the gradients of the last step
        self._batches: dict[torch.device, list[_Batch]] = {}
        self._exchanges: dict[torch.device, CutBlocks] = {}
        self._lr: dict[tuple[torch.device, int], Tensor] = {}  # float32, by device and index of the param group
        self._group_tables: dict[tuple[torch.device, torch.device], npt.NDArray[np.void]] = {}
        if not self.read(param_groups, state, dict(enumerate(self._gradients))):
            raise RuntimeError(
                "got a gradient or state that is not in memory as a dense tensor, expected ones that the kernels can "
                "read; step such parameters with another optimizer"
            )

    def _rows_of(self, index: int, param: Tensor, state: Any, group: Mapping[str, Any]) -> list[Row]:
        """The rows of a parameter; makes its state if it has a gradient, and moves it to where it lives."""
        parameter, has_gradient = self._inputs[index], self._gradients[index] is not None
        spec, name = parameter.spec, parameter.name
        if spec is None or not (has_gradient or state.get(param)):
            return []
        try:
            local = spec.shard.local(param)
            if not has_gradient:
                check_tensors(name, local, local)
            where = self._residency.of(param)
            if not state[param]:
                state[param].update(spec.new(where.state))
            own = state[param]
            for key in spec.state_names & own.keys():
                entry = own[key] if key == "step" else spec.shard.local(own[key])
                check_storage(name, f"state {key}", entry)
                check_sign(name, f"state {key}", entry)
            self._residency.put(param, spec, own)
            flat_cuts = self._flat_cuts.get(param.device) or FlatCuts([], param.device)
            noise, indices = (group["stochastic_rounding_seed"], parameter.noise), (index, parameter.group)
            sums = self._sums[param.device].addresses(index) if param.device in self._sums else []
            rows, cut = rows_of(name, spec, local, own, self._residency.of(param), flat_cuts, noise, sums, indices)
        except RuntimeError as error:
            if has_gradient or isinstance(error, torch.OutOfMemoryError):
                raise
            return []  # the error is raised when the parameter is stepped
        self._members[index] = _Member(own["step"].data_ptr(), self._residency.of(param).offload, cut)
        return rows

    def _exact_sums(self, params: Sequence[Tensor]) -> dict[torch.device, ExactSums]:
        """The sums that rules need, by the parameters' device; no entry for a device without any."""
        summed: dict[torch.device, list[Summed]] = {}
        for index, (param, parameter) in enumerate(zip(params, self._inputs, strict=True)):
            rule = self.groups[parameter.group].rule
            if rule.sums and parameter.spec is not None:
                kernels = _kernels_of(parameter.device, self._residency.of(param).offload)
                summed.setdefault(parameter.device, []).append(Summed(index, parameter.spec, rule, kernels))
        return {device: ExactSums(tensors) for device, tensors in summed.items()}

    def options_changed(self, param_groups: ParamGroups) -> bool:
        """Whether an option of a param group may have changed since the last call."""
        return self._watched.options_changed(param_groups)

    def set_groups(self, groups: list[Group]) -> bool:
        """Takes new options; False if they call for other tables."""
        same = [(g.rule, g.table_format) for g in groups] == [(g.rule, g.table_format) for g in self.groups]
        self.groups = groups
        self._new_groups = True
        return same

    def read(
        self, param_groups: ParamGroups, state: Mapping[Tensor, Any], parts: Mapping[int, Tensor | None] | None = None
    ) -> bool:
        """Reads the gradients; False if the tables no longer fit parameters, state or gradients.

        Args:
            param_groups: the optimizer's.
            state: the optimizer's.
            parts: this rank's parts of gradients, by the parameters' indices, if they are known.
        """
        result = self._watched.read(param_groups, state, parts)
        if result is not None:
            self._gradients, self._stepped = result
        return result is not None

    def demand_finite(self) -> None:
        """Raises FloatingPointError where a gradient is NaN or Inf and ``nonfinite="raise"``."""
        if any(group.nonfinite == "raise" for group in self.groups):
            demand_finite(self._inputs, self._gradients, self.groups)

    def update(self, param_groups: ParamGroups, scaling: LossScaling) -> None:
        """Fills in what is new in this step: gradients, options, loss scale."""
        kinds = self._watched.gradient_kinds()
        if kinds != self._kinds:
            self._select(np.frombuffer(kinds, dtype=np.uint8))
            self._kinds = kinds
        if self._new_groups:
            self._group_tables.clear()
            self._from_totals = [{} for _ in self.groups]
            self._new_groups = False
        self._scaling = scaling
        for device, batches in self._batches.items():
            for batch in batches:
                groups = self._groups_on(device, batch.kernels)
                batch.update(self._watched, groups, scaling, self._skipped, self._residency)
                if isinstance(batch.call, StridedCall):
                    batch.call.operands = self._operands(batch.strided, param_groups)
            # Largest copies first: where there is no memory for them, nothing was changed.
            batches.sort(key=lambda batch: -batch.copied_bytes)

    @property
    def communicates(self) -> bool:
        """Whether the step takes collectives."""
        return any(self._exchanges.values()) or any(sums.communicates for sums in self._sums.values())

    def run(self) -> None:
        """Takes the step: in any thread if it takes no collectives, whose order must be the same on all ranks.

        Raises:
            torch.OutOfMemoryError: there is no memory for a copy of a tensor that is not contiguous. Nothing was
                changed on the device that lacks it, where the largest copies come first, nor on those after it; devices
                before it, in the order of their first parameters, were stepped.
        """
        try:
            for device in self._sums:
                self._add_up(device)
            if any(group.rule.totals for group in self.groups):
                self._use_totals()
            for device in self._batches:
                self._run_on(device)
        finally:
            for batches in self._batches.values():
                for batch in batches:
                    if isinstance(batch.call, StridedCall):
                        batch.call.operands = None
        increment_version(self._stepped)  # a graph that has saved their old values is to notice
        self._gradients, self._stepped = [], []

    def _add_up(self, device: torch.device) -> None:
        """Adds up the sums that rules on a device need, over all ranks."""
        self._sums[device].clear()
        for batch in self._batches[device]:
            if batch.call is not None:
                batch.call.run(_C.Phase.sums)
        self._sums[device].exchange()

    def _use_totals(self) -> None:
        """Puts what follows from the sums over all parameters into the param groups' tables."""
        self._from_totals = [*map(dict, self._take_totals(total_of(self._sums.values())))]
        self._group_tables.clear()
        for device, batches in self._batches.items():
            for call, kernels in ((batch.call, batch.kernels) for batch in batches if batch.call is not None):
                call.update(False, self._groups_on(device, kernels), self._scaling)
        self._new_groups = True  # in the next step

    def _run_on(self, device: torch.device) -> None:
        """Runs the step itself on a device, also where only other ranks have something to step."""
        exchange = self._exchanges[device]
        calls = [batch.call for batch in self._batches[device] if batch.call is not None]
        for call in calls:
            self._skipped.keep_if_captured(call, (self._lr, exchange, self._sums))
        exchange.clear_extremes()
        for call in calls:
            call.run(_C.Phase.step)
        if not exchange:
            return
        exchange.exchange_extremes()
        if exchange.relative:
            for call in calls:
                call.run(_C.Phase.relative)
            exchange.exchange_extremes()
        for call in calls:
            call.run(_C.Phase.finish)
        exchange.share_scales()

    def _select(self, kinds: npt.NDArray[np.uint8]) -> None:
        """Divides the rows of parameters that have a gradient into batches."""
        self._skipped.retire([b.call for batches in self._batches.values() for b in batches if b.call is not None])
        has_gradient = kinds != _C.Inputs.no_gradient
        strided = has_gradient & (kinds & _C.Inputs.strided > 0)
        by_device: dict[torch.device, dict[tuple[Offload, int | None], list[int]]] = {
            d: {} for d in (*self._flat_cuts, *self._sums)
        }
        for index, member in self._members.items():
            alike = by_device.setdefault(self._inputs[index].device, {})
            if has_gradient[index]:
                alike.setdefault((member.offload, index if strided[index] else None), []).append(index)
        self._batches, self._exchanges = {}, {}
        for device, batches in by_device.items():
            self._batches[device] = [
                _Batch(
                    device,
                    offload,
                    self._table[np.isin(self._table["tensor"], tensors)],
                    [self._members[index].step for index in tensors],
                    only,
                )
                for (offload, only), tensors in batches.items()
            ]
            # In the parameters' order, which all ranks share: which parameters are strided may differ.
            with_gradient = sorted(index for tensors in batches.values() for index in tensors)
            cuts = [cut for index in with_gradient if (cut := self._members[index].cut) is not None]
            self._exchanges[device] = CutBlocks(cuts, self._flat_cuts.get(device) or FlatCuts([], device))

    def _operands(self, index: int | None, param_groups: ParamGroups) -> tuple[Tensor, Tensor]:
        """This rank's parts of a parameter and its gradient."""
        assert index is not None
        parameter, gradient = self._inputs[index], self._gradients[index]
        assert gradient is not None
        return parameter.shard.local(param_groups[parameter.group]["params"][parameter.position]), gradient

    def _groups_on(self, device: torch.device, kernels: torch.device) -> npt.NDArray[np.void]:
        """The param groups' table for kernels on one device and parameters on another or the same."""
        key = (device, kernels)
        if key not in self._group_tables:
            both = zip(self.groups, self._from_totals, strict=True)
            groups = [group._replace(hyper={**group.hyper, **more}) for group, more in both]
            rows = [self._group_row(kernels, index, group) for index, group in enumerate(groups)]
            self._group_tables[key] = table_of(rows, _C.group_entry)
        return self._group_tables[key]

    def _group_row(self, kernels: torch.device, index: int, group: Group) -> Row:
        """The row of a param group; copies a learning rate that is on a device in the order of its stream."""
        if group.lr is None:
            return group.row(None)
        if kernels.type == "cpu":
            return group._replace(hyper={**group.hyper, "lr": float(group.lr)}).row(None)
        if (kernels, index) not in self._lr:
            self._lr[kernels, index] = torch.zeros((), dtype=torch.float32, device=kernels)
        return group.row(self._lr[kernels, index].copy_(group.lr.reshape(())))


class _Member(NamedTuple):
    """A parameter that has rows, or a share in its step count.

    Attributes:
        step: address of its step count.
        offload: the operands that are copied for its step.
        cut: what its owners exchange, where a column shard cuts blocks.
    """

    step: int
    offload: Offload
    cut: CutParameter | None


class _Batch:
    """The rows that one call of the kernels steps.

    Args:
        device: the device of the parameters.
        offload: the operands that are copied for the step.
        rows: of :data:`ROW`.
        steps: addresses of the step counts, one per parameter.
        strided: the index of the one parameter that the rows are of, if it or its gradient is not contiguous.
    """

    def __init__(
        self, device: torch.device, offload: Offload, rows: npt.NDArray[np.void], steps: list[int], strided: int | None
    ) -> None:
        self.tables = Tables(rows["entry"].copy(), np.array(steps, dtype=np.uint64), _CODEC_TABLES)
        self.tensors, self._elements = rows["tensor"].copy(), rows["element"].copy()
        self.kernels = _kernels_of(device, offload)
        self.call: Call | None = None
        self.strided = strided
        self._device, self._offload, self._rows = device, offload, rows

    def update(
        self,
        watched: _C.Inputs,
        groups: npt.NDArray[np.void],
        scaling: LossScaling,
        skipped: SkippedElements,
        residency: StateResidency,
    ) -> None:
        """Fills in gradients and options; makes the call in the first step."""
        changed = watched.fill(self.tables.entries, self.tensors, self._elements)
        if self.call is None:
            self.call = self._make_call(residency)
            skipped.add(self.call, self.kernels)
            changed = True
        self.call.update(changed, groups, scaling)

    @property
    def copied_bytes(self) -> int:
        """Memory that the step takes for contiguous copies."""
        return self.call.copied_bytes if isinstance(self.call, StridedCall) else 0

    def _make_call(self, residency: StateResidency) -> Call:
        call: Call
        if self._offload is None:
            call = make_call(self._device, self.tables)
        else:
            new_unit = np.diff(self.tensors, prepend=-1) != 0
            new_unit |= np.diff(self._rows["unit"], prepend=-1) != 0
            streamed = StreamedTables(self.tables, self._rows["extent"], np.cumsum(new_unit))
            transfers = residency.transfers(self._device, self._offload)
            moves = residencies.MOVES[self._offload]
            call = StreamedCall(streamed, moves, transfers, residencies.CHUNK_BYTES, partial(make_call, self.kernels))
        return call if self.strided is None else StridedCall(self.tables, self._elements, call)


def _kernels_of(device: torch.device, offload: Offload) -> torch.device:
    """The device whose kernels step a parameter on a device."""
    return _CPU if offload == "step" else device


def _is_fixed(shard: Shard) -> bool:
    """Whether a parameter is a local tensor whose shard cannot change."""
    return shard.plain and shard.layout_attribute is None


def _flat_cuts(inputs: Sequence[Input]) -> dict[torch.device, FlatCuts]:
    """The blocks that flat shards cut, by device; no entry for a device without any."""
    by_device: dict[torch.device, list[SliceState]] = {}
    for parameter in inputs:
        if parameter.spec is not None:
            by_device.setdefault(parameter.device, []).extend(flat_slices(parameter.spec))
    cuts = {device: FlatCuts(specs, device) for device, specs in by_device.items()}
    return {device: cut for device, cut in cuts.items() if cut}
