"""Cached kernel tables, the check that decides when to rebuild them, and the run of a step on devices, by phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.devices import use_in_current_stream
from shardopt.kernels.dispatch import LossScaling
from shardopt.kernels.strided import StridedCall
from shardopt.layout import shard_of
from shardopt.state.residency import Offload
from shardopt.state.slice_spec import ROW_MOMENTS, SliceSpec, StateDict
from shardopt.state.tensor_state import flat_slices
from shardopt.step.agreement import Plan
from shardopt.step.batch import Batch, StepContext, kernels_of, run_phases
from shardopt.step.cut_blocks import CutBlocks, CutParameter, FlatCuts
from shardopt.step.exact_sums import ExactSums, Summed, total_of
from shardopt.step.group_tables import GroupTables
from shardopt.step.inputs import Input, ParamGroups, demand_finite, local_gradient, raising, unless_idle
from shardopt.step.muon.waves import Waves, WaveStep, run_waves
from shardopt.step.rows import ROW, Group, Row, SliceOfStep, rows_of


class StepTables:
    """The tables of a step, kept as long as ``_C.Inputs`` finds the tensors that they point to unchanged.

    Parameters without a gradient have rows, too: each step runs the rows of the parameters with a gradient.

    Args:
        param_groups: the optimizer's param groups.
        state: the optimizer's state.
        groups: one per param group.
        inputs: one per parameter.
        ready: the indices of the parameters whose state is ready.
        gradients: this rank's parts, checked; None for a parameter without gradient.
        plan: the description that ranks compare.
        context: what all steps use.

    Raises:
        RuntimeError: the kernels cannot step a parameter, gradient or state.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        state: Any,
        groups: list[Group],
        inputs: Sequence[Input],
        ready: Sequence[int],
        gradients: list[Tensor | None],
        plan: Plan,
        context: StepContext,
    ) -> None:
        self._groups = GroupTables(groups)
        self.plan, self._context, self._inputs = plan, context, inputs
        self._scaling = LossScaling(None, None)
        params = [param for group in param_groups for param in group["params"]]
        self._gradients = gradients  # kept alive until the step is taken
        self._stepped: list[Tensor] = []  # the parameters that the step changes
        self._waves = Waves(inputs, groups, context, by_number=plan.single)
        self._flat_cuts = _flat_cuts(inputs, self._waves)
        self._sums = self._exact_sums(params)
        self._has_totals = any(group.rule.totals for group in groups)
        self._raising = raising(groups)
        self._members: dict[int, _Member] = {}  # by the parameters' indices
        rows: list[Row] = []
        for index in ready:
            with unless_idle(gradients[index]):
                rows += self._rows_of(index, params[index], state[params[index]], param_groups[inputs[index].group])
        self._table = self._waves.take_rows(np.array(rows, ROW))  # the rows of no wave
        shards = [None if p.spec is None else p.shard for p in inputs]
        names = [p.spec.state_names if p.spec and i in self._members else None for i, p in enumerate(inputs)]
        read_gradient = partial(local_gradient, inputs)
        self._watched = _C.Inputs(list(param_groups), state, shards, names, shard_of, read_gradient)
        self._kinds: bytes | None = None  # of the gradients of the last step
        self._batches: dict[torch.device, list[Batch]] = {}
        self._wave_steps: dict[torch.device, list[WaveStep]] = {}
        self._cut_blocks: dict[torch.device, CutBlocks | None] = {}
        if not self.read(param_groups, state, dict(enumerate(self._gradients))):
            raise RuntimeError(
                "got a gradient or state that is not in memory as a dense tensor, expected tensors that the kernels "
                "can read; step such parameters with another optimizer"
            )

    def _rows_of(self, index: int, param: Tensor, state: StateDict, group: Mapping[str, Any]) -> list[Row]:
        """The rows of a parameter whose state is ready."""
        parameter, where = self._inputs[index], self._context.residency.of(param)
        spec = parameter.spec
        assert spec is not None
        seed_and_number = group["stochastic_rounding_seed"], parameter.number
        sums = self._sums[param.device].addresses(index) if param.device in self._sums else []
        flat_cuts, waves = self._flat_cuts[param.device], self._waves
        slices = [
            SliceOfStep(waves.cuts_of(index, part) or flat_cuts, sums_of_part, waves.begins_in(index, part))
            for part, sums_of_part in zip_longest(range(len(spec.slices)), sums, fillvalue=0)
        ]
        local, indices = spec.shard.local(param), (index, parameter.group)
        rows, cut = rows_of(parameter.name, spec, local, state, where, slices, seed_and_number, indices)
        self._members[index] = _Member(state["step"].data_ptr(), where.offload, cut)
        return rows

    def _exact_sums(self, params: Sequence[Tensor]) -> dict[torch.device, ExactSums]:
        """The sums that rules need, by the parameters' device; no key for a device without sums."""
        summed: dict[torch.device, list[Summed]] = {}
        for index, (param, parameter) in enumerate(zip(params, self._inputs, strict=True)):
            rule = self._groups.groups[parameter.group].rule
            if rule.sums and parameter.spec is not None:
                kernels = kernels_of(parameter.device, self._context.residency.of(param).offload)
                summed.setdefault(parameter.device, []).append(Summed(index, parameter.spec, rule, kernels))
        return {device: ExactSums(tensors) for device, tensors in summed.items()}

    def options_changed(self, param_groups: ParamGroups) -> bool:
        """Whether an option of a param group may have changed since the last call."""
        return self._watched.options_changed(param_groups)

    def set_groups(self, groups: list[Group]) -> bool:
        """Takes new options; False if they call for other tables."""
        before = self._groups.groups
        self._groups.replace(groups)
        return [_tables_of(group) for group in groups] == [_tables_of(group) for group in before]

    def read(
        self, param_groups: ParamGroups, state: Mapping[Tensor, Any], parts: Mapping[int, Tensor | None] | None = None
    ) -> bool:
        """Reads the gradients; False if the tables no longer fit parameters, state or gradients.

        Args:
            param_groups: the optimizer's param groups.
            state: the optimizer's state.
            parts: this rank's parts of gradients, by the parameters' indices, if they are known; gradients that are
                kept in the host's memory among them.
        """
        result = self._watched.read(param_groups, state, parts)
        if result is not None:
            self._gradients, self._stepped = result
        return result is not None

    def demand_finite(self) -> None:
        """Raises FloatingPointError if a gradient is NaN or Inf and ``nonfinite="raise"``."""
        if self._raising:
            demand_finite(self._inputs, self._gradients, self._groups.groups, self._raising)

    def update(self, param_groups: ParamGroups, state: Mapping[Tensor, Any], scaling: LossScaling) -> bool:
        """Fills in this step's gradients, options and loss scale.

        Returns:
            Whether other parameters may have a gradient, or gradients of another kind, than in the step before.
        """
        kinds = self._watched.gradient_kinds()
        if changed := kinds != self._kinds:
            self._select(np.frombuffer(kinds, dtype=np.uint8))
            self._kinds = kinds
        if self._has_totals:
            self._groups.follow_totals(None)
        self._scaling = scaling
        for device, batches in self._batches.items():
            for batch in batches:
                groups = self._groups.on(batch.kernels)
                batch.update(batch.fill(self._watched), groups, scaling)
                if isinstance(batch.call, StridedCall):
                    assert batch.strided is not None
                    batch.call.operands = self._operands(batch.strided, param_groups)
            slices: dict[int, list[StateDict]] = {}
            for wave in self._wave_steps[device]:
                operands = partial(self._operands, param_groups=param_groups)
                row_moments = partial(self._row_moments, slices=slices, param_groups=param_groups, state=state)
                wave.update(self._watched, self._groups, scaling, operands, row_moments)
            # Largest copies first: if memory is too short for them, nothing was changed.
            batches.sort(key=lambda batch: -batch.copied_bytes)
        return changed

    @property
    def communicates(self) -> bool:
        """Whether the step takes collectives."""
        if any(sums.communicates for sums in self._sums.values()) or any(self._cut_blocks.values()):
            return True
        return any(wave.communicates for waves in self._wave_steps.values() for wave in waves)

    def run(self) -> None:
        """Takes the step: in any thread if it takes no collectives, whose order must be equal on all ranks.

        Raises:
            torch.OutOfMemoryError: a device lacks memory for a copy of a tensor that is not contiguous. Nothing was
                changed on this device, as the largest copies come first, nor on devices after it; devices before it, in
                the order of their first parameters, were stepped. Or a device lacks memory for a wave of directions:
                the parameters in no wave and in earlier waves were stepped.
        """
        try:
            for device in self._sums:
                self._add_up(device)
            if self._has_totals:
                self._use_totals()
            for device in self._batches:
                self._run_on(device)
        finally:
            for batches in self._batches.values():
                for batch in batches:
                    if isinstance(batch.call, StridedCall):
                        batch.call.operands = None
        _C.increment_versions(self._stepped)  # for autograd graphs that have saved the old values
        self._gradients, self._stepped = [], []

    def _add_up(self, device: torch.device) -> None:
        """Adds up the sums that rules on a device need, over all ranks."""
        self._sums[device].clear()
        if cut_blocks := self._cut_blocks[device]:
            cut_blocks.keep_scales()
        for batch in self._batches[device]:
            if batch.call is not None:
                batch.call.run(_C.Phase.sums)
        self._sums[device].exchange()

    def _use_totals(self) -> None:
        """Puts the hyper-parameters that follow from the sums over all parameters into the param groups' tables."""
        self._groups.follow_totals(self._context.take_totals(total_of(self._sums.values())))
        for batches in self._batches.values():
            for batch in batches:
                if batch.call is not None:
                    batch.call.update(False, self._groups.on(batch.kernels), self._scaling)

    def _run_on(self, device: torch.device) -> None:
        """Runs the step itself on a device, even if only other ranks have something to step."""
        cut_blocks, waves = self._cut_blocks[device], self._wave_steps[device]
        calls = [batch.call for batch in self._batches[device] if batch.call is not None]
        if device.type == "cuda":
            sums = self._sums[device].memory if device in self._sums else ()
            of_waves = (tensor for wave in waves for tensor in wave.memory)
            of_cuts = cut_blocks.memory if cut_blocks else ()
            use_in_current_stream(device, (*self._groups.memory, *sums, *of_cuts, *of_waves))
            if torch.cuda.is_current_stream_capturing():
                self._context.captured.append((calls, self._groups.memory, cut_blocks, self._sums, waves))
        run_phases(calls, cut_blocks)
        if waves:
            run_waves(waves)

    def _select(self, kinds: npt.NDArray[np.uint8]) -> None:
        """Divides the rows of parameters that have a gradient into batches."""
        has_gradient = kinds != _C.Inputs.no_gradient
        self.plan.step(frozenset(np.flatnonzero(has_gradient).tolist()))
        strided = has_gradient & (kinds & _C.Inputs.strided > 0)
        by_device: dict[torch.device, dict[tuple[Offload, int | None], list[int]]] = {
            device: {} for device in self._flat_cuts
        }
        for index, member in self._members.items():
            alike = by_device[self._inputs[index].device]
            if has_gradient[index]:
                alike.setdefault((member.offload, index if strided[index] else None), []).append(index)
        self._batches, self._cut_blocks, self._wave_steps = {}, {}, {}
        for device, batches in by_device.items():
            self._batches[device] = [
                Batch(
                    device,
                    offload,
                    self._table[np.isin(self._table["tensor"], tensors)],
                    [self._members[index].step for index in tensors],  # includes parameters whose rows are in waves
                    only,
                    self._context,
                    any(self._inputs[index].gradient_on_host for index in tensors),
                )
                for (offload, only), tensors in batches.items()
            ]
            # In the parameters' order, which is equal on all ranks, unlike which parameters are strided.
            with_gradient = sorted(index for tensors in batches.values() for index in tensors)
            cuts = {index: cut for index in with_gradient if (cut := self._members[index].cut) is not None}
            self._wave_steps[device] = self._waves.steps(device, batches, cuts)
            own_cuts = [cut for index, cut in cuts.items() if not self._waves.has(index)]
            self._cut_blocks[device] = CutBlocks(own_cuts, self._flat_cuts[device]) or None

    def _operands(self, index: int, param_groups: ParamGroups) -> tuple[Tensor, Tensor]:
        """This rank's parts of a parameter and its gradient."""
        parameter, gradient = self._inputs[index], self._gradients[index]
        assert gradient is not None
        return parameter.shard.local(param_groups[parameter.group]["params"][parameter.position]), gradient

    def _row_moments(
        self,
        index: int,
        part: int,
        slices: dict[int, list[StateDict]],
        param_groups: ParamGroups,
        state: Mapping[Tensor, Any],
    ) -> Tensor:
        """This rank's second moments of the rows of a parameter's slice; ``slices`` keeps states that were split."""
        parameter = self._inputs[index]
        assert parameter.spec is not None
        param = param_groups[parameter.group]["params"][parameter.position]
        if index not in slices:  # a flat buffer has hundreds
            slices[index] = list(parameter.spec.split(state[param]))
        moments: Tensor = slices[index][part][ROW_MOMENTS]
        return moments


class _Member(NamedTuple):
    """A parameter whose steps this rank counts, perhaps without rows.

    Attributes:
        step: address of the step count.
        offload: the operands that are copied for the step.
        cut: the exchange of cut blocks, if the parameter is a column shard that cuts blocks.
    """

    step: int
    offload: Offload
    cut: CutParameter | None


def _tables_of(group: Group) -> tuple[Any, ...]:
    """The properties of a param group that its tables and messages depend on."""
    return group.rule, group.table_format, group.nonfinite == "raise"


def _flat_cuts(inputs: Sequence[Input], waves: Waves) -> dict[torch.device, FlatCuts]:
    """The blocks that flat shards of no wave cut, by device."""
    by_device: dict[torch.device, list[SliceSpec]] = {parameter.device: [] for parameter in inputs}
    for index, parameter in enumerate(inputs):
        if parameter.spec is not None and not waves.has(index):
            by_device[parameter.device].extend(flat_slices(parameter.spec))
    return {device: FlatCuts(specs, device) for device, specs in by_device.items()}
