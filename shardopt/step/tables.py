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
from shardopt.layout import shard_of
from shardopt.state.encoding import sharing_ranks
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.step.agreement import StepPlan
from shardopt.step.batch import Batch, BatchKey, kernel_device, run_phases
from shardopt.step.context import StepContext
from shardopt.step.cut_blocks import CutBlocks, CutColumns, ExtremeAddresses
from shardopt.step.exact_sums import ExactSums
from shardopt.step.groups import Group, GroupTables
from shardopt.step.inputs import ParamGroups, StepParameter, ignoring_errors_without_gradient, local_gradient
from shardopt.step.muon.waves import make_waves, run_waves
from shardopt.step.rows import ROW, table_rows


class StepTables:
    """The tables of addresses and sizes that kernels read, cached as long as ``_C.Inputs`` finds the tensors unchanged.

    All parameters that have state have rows in the table; a step runs only the rows of parameters with a gradient.

    Args:
        parameters: the descriptions of all parameters. Sets their attributes from ``sum_addresses`` to ``offload``.
        ready: the descriptions of the parameters that have state.
        gradients: this rank's shards of the gradients, checked; None for a parameter without gradient.
        plan: the plan of this step, on which the ranks have agreed.

    Raises:
        RuntimeError: the kernels cannot step a parameter, gradient or state.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        state: Any,
        groups: list[Group],
        parameters: Sequence[StepParameter],
        ready: Sequence[StepParameter],
        gradients: list[Tensor | None],
        plan: StepPlan,
        context: StepContext,
    ) -> None:
        self.groups = GroupTables(groups)
        self.plan, self._context, self.parameters = plan, context, parameters
        params = [param for group in param_groups for param in group["params"]]
        self._sums = self._make_sums(params)
        self._waves = make_waves(parameters, groups, context, by_number=plan.is_single)
        waves = [wave for of_device in self._waves.values() for wave in of_device]
        self._in_waves = {index for wave in waves for index in wave.parameters}  # their rows are in the waves
        self._cuts = self._make_cuts()
        all_cuts = filter(None, (*self._cuts.values(), *(wave.cuts for wave in waves)))
        extreme_addresses = dict(item for cuts in all_cuts for item in cuts.extreme_addresses.items())
        rows: list[tuple[Any, ...]] = []
        for parameter in ready:
            param = params[parameter.index]
            with ignoring_errors_without_gradient(gradients[parameter.index]):
                rows += self._make_rows(parameter, param, state[param], extreme_addresses)
        table = np.array(rows, ROW)
        for wave in waves:
            wave.take_rows(table)
        self._table = table[~np.isin(table["parameter"], list(self._in_waves))]
        shards = [None if parameter.spec is None else parameter.shard for parameter in parameters]
        entries = [frozenset(p.spec.entries) if p.spec and p.step_address else None for p in parameters]
        read_gradient = partial(local_gradient, parameters)
        self.watched = _C.Inputs(list(param_groups), state, shards, entries, shard_of, read_gradient)
        self._kinds: bytes | None = None  # per parameter, the last gradient's dtype and whether it is strided, or none
        self._batches: dict[torch.device, list[Batch]] = {}
        if not self.take_gradients(param_groups, state, dict(enumerate(gradients))):
            raise RuntimeError(
                "got a gradient or state that is not in memory as a dense tensor, expected tensors that the kernels "
                "can read; step such parameters with another optimizer"
            )

    def _make_sums(self, params: Sequence[Tensor]) -> ExactSums | None:
        """Allocates the sums over parameters that the rules need; None if no rule needs sums."""
        rules = [group.rule for group in self.groups.groups]
        if not any(rule.sum_count for rule in rules):
            return None
        summed = [p for p in self.parameters if p.spec is not None and rules[p.group].sum_count]
        offload_of = {p.index: self._context.residency.decide(params[p.index]).offload for p in summed}
        return ExactSums([(p, rules[p.group], kernel_device(p.device, offload_of[p.index])) for p in summed])

    def _make_cuts(self) -> dict[torch.device, CutBlocks | None]:
        """By device, the all-reduces of cut blocks outside of waves; None without them, as for FSDP2's whole rows."""
        specs: dict[torch.device, list[SliceSpec]] = {parameter.device: [] for parameter in self.parameters}
        for parameter in self.parameters:
            if parameter.index not in self._in_waves:
                specs[parameter.device] += [spec for spec in parameter.slices if sharing_ranks(spec) is not None]
        return {device: CutBlocks(cut, device) if cut else None for device, cut in specs.items()}

    def _make_rows(
        self, parameter: StepParameter, param: Tensor, state: StateDict, extreme_addresses: ExtremeAddresses
    ) -> list[tuple[Any, ...]]:
        """Makes a parameter's table rows, and sets its ``offload``, ``columns`` and ``step_address``."""
        spec, residency = parameter.spec, self._context.residency.decide(param)
        assert spec is not None
        seed = self.groups.groups[parameter.group].table_format["stochastic_rounding_seed"]
        parameter.offload = residency.offload
        if spec.has_column_cut_blocks:
            (slice_state,) = spec.split(state)
            parameter.columns = CutColumns.of(spec.slices[0], slice_state, parameter.device)
        rows = list(table_rows(parameter, spec.shard.local(param), state, residency, seed, extreme_addresses))
        parameter.step_address = state["step"].data_ptr()  # last: an error above leaves a parameter without rows
        return rows

    def take_gradients(self, param_groups: ParamGroups, state: Any, gradients: Mapping[int, Any] | None) -> bool:
        """Takes the current gradients; returns False if the tables no longer fit parameters, state or gradients.

        Runs collectives for gradients that are sharded unlike their parameters. ``gradients`` are shards that the
        caller has already, by the parameters' indices, as those in the host's memory; others are read from parameters.
        """
        result = self.watched.read(param_groups, state, gradients)
        if result is not None:  # the tables have addresses only: these references keep tensors alive until the step
            self.gradients, self._stepped = result
        return result is not None

    def update(self, param_groups: ParamGroups, state: Mapping[Tensor, Any], scaling: LossScaling) -> bool:
        """Writes the gradients' addresses, the options and the loss scale of this step into the tables.

        If other parameters have a gradient than in the last step, makes new batches, and changes :attr:`plan`.

        Returns:
            Whether gradients changed in more than address: which parameters have one, its dtype, whether it is strided.
        """
        kinds = self.watched.gradient_kinds()
        if has_changed := kinds != self._kinds:
            self._select(np.frombuffer(kinds, dtype=np.uint8))
            self._kinds = kinds
        self._param_groups, shared = param_groups, self.groups.groups[0].rule.shared if self.groups.groups else ()
        hyper = self._context.group_of(param_groups[0]).hyper if shared else {}
        self.groups.override([{name: hyper[name] for name in shared}] * len(param_groups) if shared else ())
        self._scaling = scaling
        for device, batches in self._batches.items():
            for batch in batches:
                batch.update(batch.fill(self.watched), self.groups.rows_for(batch.kernel_device), scaling)
                if batch.strided_call is not None and batch.strided_index is not None:
                    batch.strided_call.operands = self._operands(batch.strided_index, param_groups)
            if device in self._waves:
                operands = partial(self._operands, param_groups=param_groups)
                # All waves of a device share one cache, as a flat buffer may have slices in several waves.
                states = cache(partial(self._states, param_groups=param_groups, state=state))
                for wave in self._waves[device]:
                    wave.update(self.watched, self.groups, scaling, operands, states)
            # The largest copies of strided tensors come first: if memory is too short for one, nothing was changed yet.
            batches.sort(key=lambda batch: -batch.strided_call.copied_bytes if batch.strided_call is not None else 0)
        return has_changed

    @property
    def communicates(self) -> bool:
        """Whether :meth:`run` calls collectives."""
        waves = (wave for of_device in self._waves.values() for wave in of_device)
        has_sums = self._sums is not None and self._sums.communicates
        return has_sums or any(self._cuts.values()) or any(wave.communicates for wave in waves)

    def run(self) -> None:
        """Runs the prepared step; in a worker thread only without collectives, which all ranks call in the same order.

        Raises:
            torch.OutOfMemoryError: a device lacks memory for a copy of a strided tensor: none of its parameters was
                changed. Or for one of Muon's waves: the parameters of earlier waves and those without Muon were
                stepped. Devices are stepped one after another, in the order of their first parameters.
        """
        if self._sums is not None:
            self._add_up(self._sums)
        for device in self._batches:
            self._run_device(device)
        _C.increment_versions(self._stepped)  # for autograd graphs that have saved the old values
        self.gradients, self._stepped = [], []

    def _add_up(self, sums: ExactSums) -> None:
        """Computes the sums that rules need, all-reduces them, and updates hyper-parameters that depend on totals."""
        sums.clear()
        batches = [batch for of_device in self._batches.values() for batch in of_device]
        for cuts in filter(None, self._cuts.values()):
            cuts.copy_scales()
        for batch in batches:
            batch.call.run(_C.Phase.sums)
        sums.all_reduce()
        if any(group.rule.has_totals for group in self.groups.groups):
            self.groups.override(self._context.take_totals(sums.total()))
            if self.groups.groups[0].rule.shared:  # what this step has written needs no check in the next one
                self.watched.changed_groups(self._param_groups)
            for batch in batches:
                batch.update(False, self.groups.rows_for(batch.kernel_device), self._scaling)

    def _run_device(self, device: torch.device) -> None:
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
        for batch in self._batches[device]:
            if batch.strided_call is not None:
                batch.strided_call.operands = None  # else the tables would keep the gradient alive
        run_waves(waves)

    def _select(self, kinds: npt.NDArray[np.uint8]) -> None:
        """Makes the batches and the plan of a step, given the gradients' kinds; has waves select their rows, too.

        A batch has the rows of parameters with a gradient that one kernel call can step: see ``BatchKey``.
        """
        has_gradient = kinds != _C.Inputs.no_gradient
        self.plan = self.plan.with_gradients(frozenset(np.flatnonzero(has_gradient).tolist()))
        is_strided = has_gradient & (kinds & _C.Inputs.strided > 0)
        self._batches = {}
        for device, cuts in self._cuts.items():
            stepped = [p for p in self.parameters if p.step_address and p.device == device and has_gradient[p.index]]
            by_key: dict[BatchKey, list[StepParameter]] = {}
            for parameter in stepped:
                key = parameter.offload, parameter.index if is_strided[parameter.index] else None
                by_key.setdefault(key, []).append(parameter)
            self._batches[device] = []
            for key, of_key in by_key.items():  # also parameters in waves, whose steps only the batches count
                rows = self._table[np.isin(self._table["parameter"], [parameter.index for parameter in of_key])]
                self._batches[device].append(Batch(device, key, rows, of_key, self._context))
            for wave in self._waves.get(device, []):
                wave.select(by_key)
                wave.cuts.select_columns(p.columns for p in stepped if p.columns and p.index in wave.parameters)
            if cuts is not None:
                cuts.select_columns(p.columns for p in stepped if p.columns and p.index not in self._in_waves)

    def _operands(self, index: int, param_groups: ParamGroups) -> tuple[Tensor, Tensor]:
        """This rank's shards of a parameter and its gradient."""
        parameter, gradient = self.parameters[index], self.gradients[index]
        assert gradient is not None
        return parameter.shard.local(param_groups[parameter.group]["params"][parameter.position]), gradient

    def _states(self, index: int, param_groups: ParamGroups, state: Mapping[Tensor, Any]) -> list[StateDict]:
        """The state of each slice of a parameter; slow for a flat buffer, which has hundreds."""
        parameter = self.parameters[index]
        assert parameter.spec is not None
        return parameter.spec.split(state[param_groups[parameter.group]["params"][parameter.position]])
