"""The optimizer that all rules share: a torch.optim.Optimizer whose state is block-wise quantized on any shard."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from shardopt.kernels.dispatch import DTYPES, LossScaling, check_device
from shardopt.kernels.skipped import SkippedElements
from shardopt.kernels.weights import WeightFormat, noise_key
from shardopt.layout import Exchange, Shard
from shardopt.optim.entries import Group, PlannedParameter
from shardopt.optim.options import STATE_FORMAT, check_hyper, check_options, with_defaults
from shardopt.optim.plan import Plan
from shardopt.optim.rule import Rule
from shardopt.optim.state import ParameterState, StateDict

_WIDTH = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4}


@dataclass
class _Adopted:
    """State on its way through ``Optimizer.load_state_dict``, which would cast tensors to the parameter's dtype."""

    state: StateDict


class ShardedOptimizer(Optimizer):
    """Base class of the rules.

    A rule says in :meth:`rule` which moments it keeps and in :meth:`hyper` what its scalars are.

    State is created in the first step. An element whose gradient is NaN or Inf, or so large that its moments overflow,
    is skipped unless ``nonfinite`` says otherwise. torch.amp.GradScaler works unchanged: its scale is divided out
    inside the step.
    """

    #: torch.amp.GradScaler hands over ``grad_scale`` and ``found_inf`` instead of unscaling by itself.
    _step_supports_amp_scaling = True

    def __init__(self, params: ParamsT, defaults: dict[str, Any], options: Mapping[str, Any]) -> None:
        self._skipped = SkippedElements()
        super().__init__(params, {**defaults, **with_defaults(options)})

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """The rule for a param group."""
        raise NotImplementedError

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """The rule's hyper-parameters, by the names in csrc/rules."""
        raise NotImplementedError

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Checks the hyper-parameters in a param group.

        Raises:
            ValueError: one is out of range.
        """
        check_hyper(group)

    @property
    def nonfinite_count(self) -> int:
        """Gradient elements that were NaN or Inf, or overflowed, and were skipped by this rank so far."""
        return self._skipped.count(wait=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group; see :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: an option or hyper-parameter is out of range, or not for a parameter's dtype.
        """
        completed = {**self.defaults, **param_group}
        check_options(completed)
        self.check_group(completed)
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                WeightFormat.of(param.dtype, completed)
        except ValueError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes a step on every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The closure's loss.

        Raises:
            RuntimeError: a parameter or gradient has a layout, dtype or device that the kernels cannot step. Nothing
                was changed.
            ValueError: a parameter's dtype is not one for the weight format that its options ask for. Nothing was
                changed.
            FloatingPointError: a gradient is NaN or Inf and ``nonfinite="raise"``. Nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._warn_of_nonfinite()
        scaling = LossScaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        plan, self._plan = self._plan, None  # put back only after a step that went well
        if plan is None or not self._refresh(plan):
            plan = self._new_plan(scaling)
        elif scaling.found_inf is None:
            _demand_finite(plan.gradients_of("raise"))
        plan.run(scaling)
        self._plan = plan
        return loss

    def state_dict(self, *, dequantize: bool = False) -> StateDict:
        """The optimizer's state.

        Args:
            dequantize: give float32 moments in the form of torch.optim, which the optimizer of the same name there
                loads, and so does one of this class with any codec. Costs 4 bytes per parameter and moment. Low bits of
                master weights are left out.
        """
        state_dict = super().state_dict()
        if dequantize:
            for group in state_dict["param_groups"]:
                for option in STATE_FORMAT:
                    group.pop(option, None)
            state = state_dict["state"]
            for index, (group, param) in enumerate(self._all_params()):
                if index in state:
                    spec = ParameterState.of(param, group, self.rule(group).moments)
                    state[index] = {"step": state[index]["step"], **spec.decode(state[index])}
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class, or of the torch.optim class of the same name, which is quantized.

        Raises:
            ValueError: the state is of other parameters or another optimizer, or was quantized in another way. Nothing
                was changed.
        """
        last_hook = self.register_load_state_dict_pre_hook(_adopt)
        try:
            super().load_state_dict(state_dict)
        finally:
            last_hook.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "state" in state:
            for param, value in state["state"].items():
                if isinstance(value, _Adopted):
                    state["state"][param] = value.state
        super().__setstate__(state)
        self._plan = None
        self._skipped = getattr(self, "_skipped", None) or SkippedElements()

    _plan: Plan | None = None  # of the last step
    _skipped_reported = 0

    def _all_params(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            for param in group["params"]:
                yield group, param

    def _group(self, options: dict[str, Any]) -> Group:
        """What a step needs to know of a param group."""
        lr = options["lr"]
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            # Not read here: that would wait for the device.
            return Group.of(options, self.rule(options), self.hyper({**options, "lr": 0.0}), lr)
        return Group.of(options, self.rule(options), self.hyper(options), None)

    def _refresh(self, plan: Plan) -> bool:
        """Whether the plan of the last step serves for this one."""
        if plan.options_changed(self.param_groups) and not plan.set_groups([self._group(g) for g in self.param_groups]):
            return False
        return plan.refresh(self.param_groups, self.state)

    def _new_plan(self, scaling: LossScaling) -> Plan:
        """The plan of this step and those to come. Raises before anything is changed."""
        groups = [self._group(group) for group in self.param_groups]
        checked: list[tuple[str, Shard, Tensor]] = []
        planned: list[PlannedParameter | None] = []
        ready: list[tuple[int, str, int, ParameterState, Tensor]] = []
        gradients: dict[int, Tensor] = {}
        for index, group in enumerate(self.param_groups):
            for position, param in enumerate(group["params"]):
                place = len(planned)
                planned.append(None)
                if param.grad is None:
                    planned[place] = self._plan_idle(param, index, position, place, groups[index].rule)
                    continue
                spec = ParameterState.of(param, group, groups[index].rule.moments)
                name = _name_of(group, index, position, spec)
                if param.grad.is_sparse or param.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"{name}: got a sparse gradient, expected a dense one; "
                        "make it dense (e.g. nn.Embedding(sparse=False))"
                    )
                local, gradient = spec.shard.local(param), spec.shard.local_gradient(param.grad)
                _check_tensors(name, local, gradient)
                if group["nonfinite"] == "raise" and scaling.found_inf is None:
                    checked.append((name, spec.shard, gradient))
                ready.append((place, name, index, spec, param))
                gradients[place] = gradient
        _demand_finite(checked)
        for place, name, index, spec, param in ready:
            local, state = spec.shard.local(param), self.state[param]
            if not state:
                state.update(spec.new(local.device))
            planned[place] = PlannedParameter.of(name, index, spec, local, state, self._noise_key(index, place))
        self._skipped.retire()
        plan = Plan(self.param_groups, self.state, groups, planned, self._skipped)
        if not plan.refresh(self.param_groups, self.state, gradients):
            raise RuntimeError(
                "got a gradient or state that is not in memory as a dense tensor, expected ones that the kernels can "
                "read; step such parameters with another optimizer"
            )
        return plan

    def _noise_key(self, index: int, place: int) -> int:
        """Of stochastic rounding, for the parameter at a place among all, in the param group of this index."""
        return noise_key(self.param_groups[index]["stochastic_rounding_seed"], place)

    def _plan_idle(self, param: Tensor, index: int, position: int, place: int, rule: Rule) -> PlannedParameter | None:
        """The rows of a parameter that has state but no gradient now, so that one coming needs no new plan."""
        state = self.state.get(param)
        if not state:
            return None
        try:
            spec = ParameterState.of(param, self.param_groups[index], rule.moments)
            name = _name_of(self.param_groups[index], index, position, spec)
            local = spec.shard.local(param)
            _check_tensors(name, local, local)
            return PlannedParameter.of(name, index, spec, local, state, self._noise_key(index, place))
        except (RuntimeError, KeyError, ValueError):
            return None  # what is wrong with it is to be told when it is stepped

    def _warn_of_nonfinite(self) -> None:
        known = self._skipped.count(wait=False)
        new = known - self._skipped_reported
        if new > 0:
            self._skipped_reported = known
            warnings.warn(
                f"skipped {new} gradient elements that were NaN or Inf; their parameters and state are as they were "
                "(nonfinite='raise' names the parameter)",
                RuntimeWarning,
                stacklevel=5,  # past torch's wrappers of step()
            )


def _adopt(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """A load-state-dict pre-hook: turns whatever was loaded into the optimizer's own kind of state, or raises."""
    assert isinstance(optimizer, ShardedOptimizer)
    saved, own = state_dict["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in own]:
        raise ValueError(
            f"got a state dict with {[len(group['params']) for group in saved]} parameters per param group, "
            f"expected {[len(group['params']) for group in own]}"
        )
    groups = []
    for index, (saved_group, group) in enumerate(zip(saved, own, strict=True)):
        for option in STATE_FORMAT:
            if saved_group.get(option, group[option]) != group[option]:
                raise ValueError(
                    f"param group {index}: got state saved with {option}={saved_group[option]!r}, expected "
                    f"{group[option]!r}; make the optimizer with {option}={saved_group[option]!r}, or go through "
                    "state_dict(dequantize=True)"
                )
        rest = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**rest, **saved_group})
        check_options(groups[-1])
        optimizer.check_group(groups[-1])
    ids = [index for group in saved for index in group["params"]]
    state: StateDict = {}
    of_torch = all("master_weight_bits" not in group for group in saved)  # or dequantized: neither knows of them
    for position, (index, (group, param)) in enumerate(zip(ids, optimizer._all_params(), strict=True)):
        if index in state_dict["state"]:
            spec = ParameterState.of(param, group, optimizer.rule(group).moments)
            loaded = state_dict["state"][index]
            device = spec.shard.local(param).device
            adopted = spec.adopt(loaded, device, f"parameter {position}", of_torch=of_torch) if loaded else {}
            state[index] = _Adopted(adopted)
    return {**state_dict, "state": state, "param_groups": groups}


def _name_of(group: Mapping[str, Any], index: int, position: int, spec: ParameterState) -> str:
    """How errors name a parameter."""
    names = group.get("param_names")
    name = names[position] if names else f"parameter {position} of param group {index}"
    return f"{name} {spec.shard.global_shape}"


def _demand_finite(gradients: Sequence[tuple[str, Shard, Tensor]]) -> None:
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
        if not tensor.is_contiguous():
            raise RuntimeError(
                f"{name}: got a {what} with strides {tensor.stride()}, expected a contiguous one; "
                f"make it so with .contiguous() before the step"
            )
    if gradient.device != param.device or gradient.shape != param.shape:
        raise RuntimeError(
            f"{name}: got a gradient of shape {tuple(gradient.shape)} on {gradient.device}, "
            f"expected {tuple(param.shape)} on {param.device}"
        )
    if _WIDTH[gradient.dtype] < _WIDTH[param.dtype] or (
        gradient.dtype != param.dtype and gradient.dtype != torch.float32
    ):
        raise RuntimeError(
            f"{name}: got a gradient of {gradient.dtype} for a parameter of {param.dtype}, "
            "expected the same dtype or float32; cast the gradient"
        )
