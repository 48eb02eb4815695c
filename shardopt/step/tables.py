"""The kernels' tables, cached between steps, the check that they are still valid, and the run of a prepared step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import LossScaling
from shardopt.kernels.dispatch_cuda import use_in_current_stream
from shardopt.kernels.strided import StridedCall
from shardopt.layout import Shard, shard_of
from shardopt.state.encoding import sharing_ranks
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.step.agreement import StepPlan
from shardopt.step.batch import Alike, Batch, kernels_of, run_phases
from shardopt.step.context import StepContext
from shardopt.step.cut_blocks import CutBlocks, CutColumns
from shardopt.step.exact_sums import ExactSums
from shardopt.step.groups import Group, GroupTables
from shardopt.step.inputs import Input, ParamGroups, demand_finite, ignoring_errors_without_gradient, local_gradient
from shardopt.step.muon.waves import run_waves, wave_steps
from shardopt.step.rows import ROW, Row, rows_of


class StepTables:
    """The tables of addresses and sizes that kernels read, cached as long as ``_C.Inputs`` finds the tensors unchanged.

    All parameters that have state have rows in the table; a step runs only the rows of parameters with a gradient.

    Args:
        param_groups: the optimizer's param groups.
        state: the optimizer's state.
        groups: the options of each param group.
        inputs: the descriptions of all parameters.
        ready: the descriptions of the parameters that have state.
        gradients: this rank's shards of the gradients, checked; None for a parameter without gradient.
        plan: the descriptions of parameters that ranks compare before they exchange data.
        context: the optimizer.

    Raises:
        RuntimeError: the kernels cannot step a parameter, gradient or state.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        state: Any,
        groups: list[Group],
        inputs: Sequence[Input],
        ready: Sequence[Input],
        gradients: list[Tensor | None],
        plan: StepPlan,
        context: StepContext,
    ) -> None:
        self.groups = GroupTables(groups)
        self.plan, self._context, self._inputs = plan, context, inputs
        self._scaling = LossScaling(None, None)
        params = [param for group in param_groups for param in group["params"]]
        self._gradients = gradients  # kept alive until the step is taken
        self._stepped: list[Tensor] = []  # the parameters that the step changes
        self._sums: ExactSums | None = None
        if any(group.rule.sum_count for group in groups):
            self._sums = ExactSums(
                (parameter, rule, kernels_of(parameter.device, context.residency.decide(param).offload))
                for param, parameter in zip(params, inputs, strict=True)
                if parameter.spec is not None and (rule := groups[parameter.group].rule).sum_count
            )
        self._waves = wave_steps(inputs, groups, context, by_number=plan.single)
        waves = [wave for of_device in self._waves.values() for wave in of_device]
        self._in_waves = {index for wave in waves for index in wave.tensors}
        cut: dict[torch.device, list[SliceSpec]] = {parameter.device: [] for parameter in inputs}
        for parameter in inputs:
            if parameter.index not in self._in_waves:
                cut[parameter.device] += [spec for spec in parameter.slices if sharing_ranks(spec) is not None]
        # None where no blocks are cut, as under FSDP2, whose shards are whole rows.
        self._cuts = {device: CutBlocks(specs, device) if specs else None for device, specs in cut.items()}
        cuts = (*self._cuts.values(), *(wave.cuts for wave in waves))
        extremes_of = {block: addresses for each in cuts if each for block, addresses in each.flat.items()}
        rows: list[Row] = []
        for parameter in ready:
            with ignoring_errors_without_gradient(gradients[parameter.index]):
                rows += self._rows_of(parameter, params[parameter.index], state[params[parameter.index]], extremes_of)
        table = np.array(rows, ROW)
        for wave in waves:
            wave.take_rows(table)
        self._table = table[~np.isin(table["tensor"], list(self._in_waves))]
        shards = [None if p.spec is None else p.shard for p in inputs]
        names = [frozenset(p.spec.entries) if p.spec and p.step else None for p in inputs]
        read_gradient = partial(local_gradient, inputs)
        self.watched = _C.Inputs(list(param_groups), state, shards, names, shard_of, read_gradient)
        self._kinds: bytes | None = None  # per parameter, the kind of gradient in the last step: none, strided, ...
        self._batches: dict[torch.device, list[Batch]] = {}
        if not self.read(param_groups, state, dict(enumerate(self._gradients))):
            raise RuntimeError(
                "got a gradient or state that is not in memory as a dense tensor, expected tensors that the kernels "
                "can read; step such parameters with another optimizer"
            )

    def _rows_of(
        self, parameter: Input, param: Tensor, state: StateDict, extremes_of: Mapping[tuple[Shard, int], list[int]]
    ) -> list[Row]:
        """Makes a parameter's table rows, and sets ``offload``, ``columns`` and ``step`` of its description."""
        spec, where = parameter.spec, self._context.residency.decide(param)
        assert spec is not None
        seed = self.groups.groups[parameter.group].table_format["stochastic_rounding_seed"]
        parameter.offload = where.offload
        if spec.has_column_cut_blocks:
            (of_slice,) = spec.split(state)
            parameter.columns = CutColumns.of(spec.slices[0], of_slice, parameter.device)
        rows = list(rows_of(parameter, spec.shard.local(param), state, where, seed, extremes_of))
        parameter.step = state["step"].data_ptr()
        return rows

    def read(
        self, param_groups: ParamGroups, state: Mapping[Tensor, Any], parts: Mapping[int, Tensor | None] | None = None
    ) -> bool:
        """Takes the current gradients; returns False if the tables no longer fit parameters, state or gradients.

        Args:
            param_groups: the optimizer's param groups.
            state: the optimizer's state.
            parts: this rank's shards of gradients, by the parameters' indices, where the caller already has them, as
                for gradients in the host's memory. Other gradients are read from the parameters.
        """
        result = self.watched.read(param_groups, state, parts)
        if result is not None:
            self._gradients, self._stepped = result
        return result is not None

    def demand_finite(self) -> None:
        """Raises FloatingPointError if a gradient is NaN or Inf and ``nonfinite="raise"``."""
        demand_finite(self._inputs, self._gradients, self.groups.groups)

    def update(self, param_groups: ParamGroups, state: Mapping[Tensor, Any], scaling: LossScaling) -> bool:
        """Writes the gradients' addresses, the options and the loss scale of this step into the tables.

        Returns:
            Whether the parameters with a gradient, or the gradients' kinds (such as strided), may have changed.
        """
        kinds = self.watched.gradient_kinds()
        if changed := kinds != self._kinds:
            self._select(np.frombuffer(kinds, dtype=np.uint8))
            self._kinds = kinds
        self.groups.follow_totals(None)
        self._scaling = scaling
        for device, batches in self._batches.items():
            for batch in batches:
                groups = self.groups.on(batch.kernels)
                batch.update(batch.fill(self.watched), groups, scaling)
                if isinstance(batch.call, StridedCall):
                    assert batch.strided is not None
                    batch.call.operands = self._operands(batch.strided, param_groups)
            if device in self._waves:
                operands = partial(self._operands, param_groups=param_groups)
                states = cache(partial(self._states, param_groups=param_groups, state=state))
                for wave in self._waves[device]:
                    wave.update(self.watched, self.groups, scaling, operands, states)
            # Batches with the largest copies run first: if memory is too short for a copy, nothing was changed yet.
            batches.sort(key=lambda batch: -batch.copied_bytes)
        return changed

    @property
    def communicates(self) -> bool:
        """Whether :meth:`run` calls collectives."""
        waves = (wave for of_device in self._waves.values() for wave in of_device)
        has_sums = self._sums is not None and self._sums.communicates
        return has_sums or any(self._cuts.values()) or any(wave.communicates for wave in waves)

    def run(self) -> None:
        """Runs the prepared step; in a worker thread only without collectives, which all ranks call in the same order.

        Raises:
            torch.OutOfMemoryError: a device lacks memory for a copy of a tensor that is not contiguous. Nothing was
                changed on this device, as the largest copies come first, nor on devices after it; devices before it, in
                the order of their first parameters, were stepped. Or a device lacks memory for a wave of directions:
                the parameters in no wave and in earlier waves were stepped.
        """
        try:
            if self._sums is not None:
                self._add_up(self._sums)
            for device in self._batches:
                self._run_on(device)
        finally:
            for batches in self._batches.values():
                for batch in batches:
                    if isinstance(batch.call, StridedCall):
                        batch.call.operands = None
        _C.increment_versions(self._stepped)  # for autograd graphs that have saved the old values
        self._gradients, self._stepped = [], []

    def _add_up(self, sums: ExactSums) -> None:
        """Computes the sums that rules need, all-reduces them, and updates hyper-parameters that depend on totals."""
        sums.clear()
        batches = [batch for of_device in self._batches.values() for batch in of_device]
        for cuts in filter(None, self._cuts.values()):
            cuts.keep_scales()
        for batch in batches:
            batch.call.run(_C.Phase.sums)
        sums.exchange()
        if any(group.rule.has_totals for group in self.groups.groups):
            self.groups.follow_totals(self._context.take_totals(sums.total()))
            for batch in batches:
                batch.update(False, self.groups.on(batch.kernels), self._scaling)

    def _run_on(self, device: torch.device) -> None:
        """Runs a device's kernels and collectives; even without gradients here, as other ranks wait for this rank."""
        cuts, waves = self._cuts[device], self._waves.get(device, [])
        calls = [batch.call for batch in self._batches[device]]
        if device.type == "cuda":
            used = (self.groups, self._sums, cuts, *(wave.cuts for wave in waves))
            memory = [tensor for each in used if each is not None for tensor in each.memory]
            use_in_current_stream(device, memory)
            if torch.cuda.is_current_stream_capturing():
                self._context.captured.append((calls, memory, [wave.passes for wave in waves]))
        run_phases(calls, cuts)
        if waves:
            run_waves(waves)

    def _select(self, kinds: npt.NDArray[np.uint8]) -> None:
        """Makes the batches of a step: selects the rows of parameters with a gradient, and groups them by device."""
        has_gradient = kinds != _C.Inputs.no_gradient
        self.plan = self.plan.with_gradients(frozenset(np.flatnonzero(has_gradient).tolist()))
        strided = has_gradient & (kinds & _C.Inputs.strided > 0)
        self._batches = {}
        for device, cuts in self._cuts.items():
            stepped = [p for p in self._inputs if p.step and p.device == device and has_gradient[p.index]]
            alike: dict[Alike, list[Input]] = {}
            for parameter in stepped:
                key = parameter.offload, parameter.index if strided[parameter.index] else None
                alike.setdefault(key, []).append(parameter)
            self._batches[device] = []
            for key, of_key in alike.items():  # also parameters in waves: batches count their steps
                rows = self._table[np.isin(self._table["tensor"], [parameter.index for parameter in of_key])]
                self._batches[device].append(Batch(device, key, rows, of_key, self._context))
            for wave in self._waves.get(device, []):
                wave.select(alike)
                wave.cuts.select(p.columns for p in stepped if p.columns is not None and p.index in wave.tensors)
            if cuts is not None:
                cuts.select(p.columns for p in stepped if p.columns is not None and p.index not in self._in_waves)

    def _operands(self, index: int, param_groups: ParamGroups) -> tuple[Tensor, Tensor]:
        """This rank's shards of a parameter and its gradient."""
        parameter, gradient = self._inputs[index], self._gradients[index]
        assert gradient is not None
        return parameter.shard.local(param_groups[parameter.group]["params"][parameter.position]), gradient

    def _states(self, index: int, param_groups: ParamGroups, state: Mapping[Tensor, Any]) -> list[StateDict]:
        """The state of each slice of a parameter. Callers cache the result, as a flat buffer has hundreds of slices."""
        parameter = self._inputs[index]
        assert parameter.spec is not None
        return parameter.spec.split(state[param_groups[parameter.group]["params"][parameter.position]])
