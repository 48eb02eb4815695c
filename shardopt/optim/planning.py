"""Makes the plan of a step: looks at all parameters and gradients, and raises before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.kernels.dispatch import DTYPES, LossScaling, check_device, check_storage
from shardopt.kernels.skipped import SkippedElements
from shardopt.layout import Exchange, FlatBuffer, UnknownShardError
from shardopt.optim.cut_blocks import FlatCuts
from shardopt.optim.entries import Group, Noise, PlannedParameter
from shardopt.optim.names import listed_name
from shardopt.optim.placement import StatePlaces
from shardopt.optim.plan import FiniteCheck, FlatParameters, Plan
from shardopt.optim.slice_state import SliceState
from shardopt.optim.tensor_state import TensorState, flat_slices, tensor_state_of


class _Parameter(NamedTuple):
    """A parameter of the optimizer.

    Attributes:
        param: as it stands in the param group.
        group: the index of its param group.
        name: how errors name it.
        spec: what its state looks like; None where that cannot be said of a parameter that is not to be stepped.
        noise: what that of stochastic rounding depends on.
    """

    param: Tensor
    group: int
    name: str
    spec: TensorState | None
    noise: Noise

    @property
    def is_flat(self) -> bool:
        return self.spec is not None and bool(flat_slices(self.spec))

    def check_of(self, gradient: Tensor) -> tuple[int, FiniteCheck]:
        """What is to be looked at where NaN and Inf in gradients are errors."""
        assert self.spec is not None
        return self.group, (self.name, self.spec.shard, gradient)

    def planned(self, state: Mapping[Tensor, Any], flat: FlatCuts, places: StatePlaces) -> PlannedParameter:
        """Its rows in the tables; moves its state to where it lives."""
        assert self.spec is not None
        shard, own = self.spec.shard, state[self.param]
        for key in self.spec.state_names & own.keys():
            check_storage(self.name, f"state {key}", own[key] if key == "step" else shard.local(own[key]))
        places.put(self.param, self.spec, own)
        local, place = shard.local(self.param), places.place(self.param)
        return PlannedParameter.of(self.name, self.group, self.spec, local, own, self.noise, flat, place)

    def planned_if_possible(
        self, state: Mapping[Tensor, Any], flat: FlatCuts, places: StatePlaces
    ) -> PlannedParameter | None:
        """The rows of one that has state but no gradient now, so that one coming needs no new plan."""
        if self.spec is None or not state.get(self.param):
            return None
        try:
            local = self.spec.shard.local(self.param)
            _check_tensors(self.name, local, local)
            return self.planned(state, flat, places)
        except (RuntimeError, KeyError, ValueError):
            return None  # what is wrong with it is to be told when it is stepped


def make_plan(
    param_groups: list[dict[str, Any]],
    state: Any,
    groups: list[Group],
    scaling: LossScaling,
    skipped: SkippedElements,
    places: StatePlaces,
    numbers: Mapping[Tensor, int],
    first_place: int = 0,
    name: str | None = None,
) -> Plan:
    """The plan of this step and those to come; makes the state of parameters that are stepped for the first time.

    Args:
        param_groups: the optimizer's, or some of its parameters.
        state: the optimizer's.
        groups: one per param group.
        scaling: the loss scale.
        skipped: where skipped elements are counted.
        places: where the state of each parameter lives.
        numbers: which of all parameters each is, where the optimizer has only some of them.
        first_place: the first parameter's place among all that the optimizer has.
        name: how errors name the parameter, if it is a single one that is not the param group's first.

    Raises:
        RuntimeError: a parameter, gradient or state is not what the kernels can step. Nothing was changed.
        ValueError: a parameter's dtype is not one for the weight format that its options ask for. Nothing was changed.
        FloatingPointError: a gradient is NaN or Inf and ``nonfinite="raise"``. Nothing was changed.
    """
    found = _parameters(param_groups, groups, numbers, first_place, name)
    gradients: dict[int, Tensor] = {}
    checks: dict[int, tuple[int, FiniteCheck]] = {}
    idle = {place: p.check_of(_nothing(p)) for place, p in enumerate(found) if p.is_flat}
    for place, parameter in enumerate(found):
        if parameter.param.grad is not None:
            gradients[place] = _gradient(parameter)
            checks[place] = parameter.check_of(gradients[place])
    if scaling.found_inf is None:
        checks = {**idle, **checks}
        demand_finite([checks[p][1] for p in sorted(checks) if groups[checks[p][0]].nonfinite == "raise"])
    cuts = _flat_cuts(found)
    planned: list[PlannedParameter | None] = []
    for place, parameter in enumerate(found):
        param, spec = parameter.param, parameter.spec
        flat = cuts.get(param.device) or FlatCuts([], param.device)
        if place not in gradients:
            planned.append(parameter.planned_if_possible(state, flat, places))
            continue
        assert spec is not None
        if not state[param]:
            state[param].update(spec.new(places.place(param).state))
        planned.append(parameter.planned(state, flat, places))
    skipped.retire()
    plan = Plan(param_groups, state, groups, planned, FlatParameters(cuts, idle), skipped, places)
    if not plan.refresh(param_groups, state, gradients):
        raise RuntimeError(
            "got a gradient or state that is not in memory as a dense tensor, expected ones that the kernels can "
            "read; step such parameters with another optimizer"
        )
    return plan


def _parameters(
    param_groups: list[dict[str, Any]],
    groups: list[Group],
    numbers: Mapping[Tensor, int],
    first_place: int,
    name: str | None,
) -> list[_Parameter]:
    found: list[_Parameter] = []
    for index, group in enumerate(param_groups):
        for position, param in enumerate(group["params"]):
            try:
                spec = tensor_state_of(param, group, groups[index].rule.moments)
            except UnknownShardError:
                raise  # on ranks without a gradient, too: the others would wait for them
            except (RuntimeError, ValueError):
                if param.grad is not None:
                    raise
                spec = None
            noise = Noise(group["stochastic_rounding_seed"], numbers.get(param, first_place + len(found)))
            known_as = name or listed_name(group, index, position)
            if spec is not None:
                known_as = f"{known_as} {spec.shard.global_shape}"
            found.append(_Parameter(param, index, known_as, spec, noise))
    _demand_places(found)
    return found


def _demand_places(found: Sequence[_Parameter]) -> None:
    """Checks that stochastic rounding knows which of all parameters those in flat buffers are.

    Raises:
        UnknownShardError: there are others beside them, and the whole model was never seen.
    """
    specs = [parameter.spec for parameter in found]
    params = sum(1 if spec is None else len(spec.slices) for spec in specs)
    for parameter, spec in zip(found, specs, strict=True):
        if spec is not None and isinstance(spec.shard, FlatBuffer) and spec.weights.stochastic:
            known = spec.shard.known_params
            if known is not None and known < params:
                raise UnknownShardError(
                    f"{parameter.name}: got flat parameters of a part of the model for stochastic_rounding, whose "
                    "noise depends on their places in the whole; call optimizer.attach(model) with the whole model, or "
                    "set use_orig_params=True"
                )


def _gradient(parameter: _Parameter) -> Tensor:
    """This rank's part of a parameter's gradient, checked."""
    param, _, name, spec, _ = parameter
    assert spec is not None
    assert param.grad is not None
    if param.grad.is_sparse or param.grad.layout != torch.strided:
        raise RuntimeError(
            f"{name}: got a sparse gradient, expected a dense one; make it dense (e.g. nn.Embedding(sparse=False))"
        )
    gradient = spec.shard.local_gradient(param.grad)
    _check_tensors(name, spec.shard.local(param), gradient)
    return gradient


def _nothing(parameter: _Parameter) -> Tensor:
    """Stands for a gradient that only other ranks may have."""
    return parameter.param.detach().reshape(-1)[:0].float()


def _flat_cuts(found: Sequence[_Parameter]) -> dict[torch.device, FlatCuts]:
    """What the flat shards on each device share."""
    by_device: dict[torch.device, list[SliceState]] = {}
    for parameter in found:
        if parameter.spec is not None:
            by_device.setdefault(parameter.param.device, []).extend(flat_slices(parameter.spec))
    cuts = {device: FlatCuts(specs, device) for device, specs in by_device.items()}
    return {device: cut for device, cut in cuts.items() if cut}


def demand_finite(gradients: Sequence[FiniteCheck]) -> None:
    """Raises on all ranks that hold parts of a parameter if one of them has NaN or Inf in its gradient.

    Args:
        gradients: name, shard and this rank's part of the gradient. Ranks that share parameters pass the same ones.

    Raises:
        FloatingPointError: there are such gradients.
    """
    together: dict[tuple[Exchange | None, torch.device], list[tuple[str, Tensor]]] = {}
    for name, shard, gradient in gradients:
        low, high = torch.aminmax(gradient) if gradient.numel() else gradient.new_zeros(2)
        flag = torch.isfinite(low + high * 0).logical_not().int()
        together.setdefault((shard.holders, gradient.device), []).append((name, flag))
    bad: list[str] = []
    for (holders, _), flags in together.items():
        found = torch.stack([flag for _, flag in flags])
        if holders is not None:
            holders.all_reduce_max(found)
        bad += [name for (name, _), flag in zip(flags, found.tolist(), strict=True) if flag]
    if bad:
        raise FloatingPointError(f"{', '.join(bad)}: got a gradient with NaN or Inf; nothing was changed")


def _check_tensors(name: str, param: Tensor, gradient: Tensor) -> None:
    """Checks that the kernels can step this rank's part of a parameter.

    Raises:
        RuntimeError: they cannot.
    """
    check_device(name, param.device)
    supported = ", ".join(str(dtype) for dtype in DTYPES)
    for what, tensor in (("parameter", param), ("gradient", gradient)):
        if tensor.dtype not in DTYPES:
            remedy = "step real and imaginary parts apart" if tensor.is_complex() else "cast it"
            raise RuntimeError(f"{name}: got a {what} of {tensor.dtype}, expected {supported}; {remedy}")
        check_storage(name, what, tensor)
    if _may_overlap(param):
        raise RuntimeError(
            f"{name}: got a parameter with strides {param.stride()}, whose elements share memory, expected memory of "
            "its own for each; make the parameter of a .clone()"
        )
    if gradient.device != param.device or gradient.shape != param.shape:
        raise RuntimeError(
            f"{name}: got a gradient of shape {tuple(gradient.shape)} on {gradient.device}, "
            f"expected {tuple(param.shape)} on {param.device}"
        )
    if gradient.dtype not in (param.dtype, torch.float32):
        raise RuntimeError(
            f"{name}: got a gradient of {gradient.dtype} for a parameter of {param.dtype}, "
            "expected the same dtype or float32; cast the gradient"
        )


def _may_overlap(tensor: Tensor) -> bool:
    """Whether elements may share memory, as those of an expanded tensor do: one dimension steps within another."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
