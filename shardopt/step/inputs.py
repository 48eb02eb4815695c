"""Description and checks of the parameters and gradients of a step, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardopt.kernels.dispatch import DTYPES, check_device
from shardopt.kernels.memory import check_sign, check_storage, find_overlap
from shardopt.layout import FlatBuffer, RankGroup, Shard, UnknownShardError, all_reduce_any, assigned
from shardopt.layout.names import number_of, use_numbers
from shardopt.state.names import naming_errors, param_name
from shardopt.state.residency import Offload, StateResidency
from shardopt.state.slice_spec import SliceSpec
from shardopt.state.tensor_spec import TensorSpec, tensor_spec_of
from shardopt.state.warn import warn_user
from shardopt.step.context import StepContext
from shardopt.step.cut_blocks import CutColumns
from shardopt.step.groups import Group

ParamGroups = Sequence[Mapping[str, Any]]


@dataclass
class StepParameter:
    """One of the optimizer's parameters, as a step needs to know it: name, shard, state, and addresses for the kernels.

    Attributes:
        index: index among all parameters of the step, in the order of the param groups.
        name: the parameter's name in errors.
        group: index of the parameter's param group.
        position: index among the parameters of the param group.
        device: device of the parameter's memory.
        spec: describes the parameter's state; None for a parameter without gradient that cannot be stepped.
        number: index among all of the model's parameters, or of the optimizer's if the model is not known; seeds the
            noise of stochastic rounding. Slices of a flat buffer have numbers of their own (``SliceSpec.number``).
        replica_ranks: ranks that hold replicas and divide the orthogonalization of parameters among them; or None.
        gradient_on_host: whether the gradient is in the host's memory, for a parameter with ``offload="step"`` whose
            attribute ``grad`` is None.
        sum_addresses: by index in ``slices``, the buffer to which kernels add the slice's exact sums (``ExactSums``).
        matrix_begins: by index in ``slices``, the offsets at which Muon's matrices begin; table rows are split there.
        columns: the buffers that ranks all-reduce if the parameter is a column shard that cuts blocks; otherwise None.
        step_address: address of the step count; 0 as long as the parameter has no table rows.
        offload: the option ``offload``, which decides what is copied between device and host for the step.
    """

    index: int
    name: str
    group: int
    position: int
    device: torch.device
    spec: TensorSpec | None
    number: int
    replica_ranks: RankGroup | None
    gradient_on_host: bool
    sum_addresses: dict[int, int] = field(default_factory=dict)
    matrix_begins: dict[int, list[int]] = field(default_factory=dict)
    columns: CutColumns | None = None
    step_address: int = 0
    offload: Offload = None

    @property
    def shard(self) -> Shard:
        """The part of the parameter that this rank holds."""
        assert self.spec is not None
        return self.spec.shard

    @property
    def slices(self) -> tuple[SliceSpec, ...]:
        """The slices of model parameters that the parameter is made of: several in a flat buffer, otherwise one."""
        return () if self.spec is None else self.spec.slices


def describe_parameters(
    param_groups: ParamGroups,
    groups: Sequence[Group],
    context: StepContext,
    first_index: int,
    name: str | None,
    gradient_on_host: bool,
) -> list[StepParameter]:
    """Describes all parameters of a step.

    Once a parameter uses its number in the model, sets ``context.is_numbered``, and has all others use theirs.

    ``param_groups`` may also be groups with their options and some of their parameters; ``first_index`` is the index of
    the first of these in the optimizer. For a step of a single parameter, ``name`` is its name in errors, and
    ``gradient_on_host`` says whether its gradient is in the host's memory.

    Raises:
        RuntimeError: the shard of a parameter is not known, or a parameter with a gradient is sharded in a way that the
            kernels cannot step; or flat buffers are rounded at random, and the model was never seen as a whole.
        ValueError: the weight format that the options ask for does not fit the dtype of a parameter with a gradient.
    """
    parameters: list[StepParameter] = []
    unnumbered: list[str] = []  # parameters whose noise depends on their places in the optimizer
    params = [param for group in param_groups for param in group["params"]]
    context.is_numbered |= any(number_of(param) is not None for param in params)
    if context.is_numbered:  # the user may have put other parameters into the groups since they were numbered
        use_numbers(param for param in params if number_of(param) is None)
    for group_index, options in enumerate(param_groups):
        for position, param in enumerate(options["params"]):
            try:
                spec = tensor_spec_of(param, options, groups[group_index].rule.moments)
            except UnknownShardError:
                raise  # even without a gradient: ranks that have one would wait for this rank's data
            except (RuntimeError, ValueError):
                if param.grad is not None or gradient_on_host:
                    raise
                spec = None
            index, device, replica_ranks = len(parameters), param.device, context.copies.get(param)
            full_name = name or param_name(options, group_index, position)
            if spec is not None:
                full_name = f"{full_name} {spec.shard.global_shape}"
            number = number_of(param)
            if number is None:
                number = context.model_indices.get(param, first_index + index)
                is_random = spec is not None and any(slice_.is_random for slice_ in spec.slices)
                if is_random and not isinstance(assigned(param), FlatBuffer):  # whose slices have numbers
                    unnumbered.append(full_name)
            of_group = index, full_name, group_index, position
            parameters.append(StepParameter(*of_group, device, spec, number, replica_ranks, gradient_on_host))
    if context.is_numbered and unnumbered:
        warn_user(
            f"{', '.join(unnumbered[:5])}: got {len(unnumbered)} parameters without a number in the model, unlike "
            "other or earlier ones, to be rounded at random, so that their noise depends on their places in the "
            "optimizer; call optimizer.attach(model)",
            RuntimeWarning,
        )
    _demand_distinct_noise(parameters)
    return parameters


def _demand_distinct_noise(parameters: Sequence[StepParameter]) -> None:
    """Raises UnknownShardError if slices of flat buffers, which are rounded at random, would have the same noise.

    Slices are numbered within the model that was read. If it is only a part, others may have the same numbers.
    """
    random_slices = [(parameter, x.number) for parameter in parameters for x in parameter.slices if x.is_random]
    seeds = [parameter.number if number is None else number for parameter, number in random_slices]
    if len(set(seeds)) < len(seeds) and any(number is not None for _, number in random_slices):
        raise UnknownShardError(
            "got flat parameters of a part of the model for rounding at random, expected a model that is known as a "
            "whole, as the noise depends on the parameters' places in it; call optimizer.attach(model) with the whole "
            "model, or set use_orig_params=True"
        )


def local_gradients(
    params: Sequence[Tensor], parameters: Sequence[StepParameter], host_gradient: Tensor | None
) -> list[Tensor | None]:
    """Checks all gradients and returns this rank's shards. Runs collectives for gradients sharded unlike parameters.

    ``host_gradient`` is this rank's shard of the gradient of a single parameter, in the host's memory.

    Raises:
        RuntimeError: the kernels cannot step a parameter or its gradient.
    """
    gradients: list[Tensor | None] = []
    for param, parameter in zip(params, parameters, strict=True):
        gradient = host_gradient if param.grad is None else param.grad
        if gradient is not None:
            with naming_errors(parameter.name):
                local = parameter.shard.local(param)
            device = torch.device("cpu") if gradient is host_gradient else local.device
            if gradient is not host_gradient:
                gradient = local_gradient(parameters, parameter.index, gradient)
            check_tensors(parameter.name, local, gradient, device)
        gradients.append(gradient)
    return gradients


def local_gradient(parameters: Sequence[StepParameter], index: int, gradient: Tensor) -> Tensor:
    """This rank's shard of a parameter's gradient. Runs collectives for a gradient sharded unlike its parameter.

    Raises:
        RuntimeError: the gradient is not sharded over the parameter's ranks, or cannot be copied to memory.
    """
    with naming_errors(parameters[index].name):
        return parameters[index].shard.local_gradient(gradient)


@contextmanager
def ignoring_errors_without_gradient(gradient: Tensor | None) -> Iterator[None]:
    """Suppresses errors about a parameter without gradient, except for lack of memory; a step with one raises them."""
    try:
        yield
    except RuntimeError as error:
        if gradient is not None or isinstance(error, torch.OutOfMemoryError):
            raise


def prepare_states(
    params: Sequence[Tensor],
    state: Any,
    parameters: Sequence[StepParameter],
    gradients: Sequence[Tensor | None],
    residency: StateResidency,
) -> list[StepParameter]:
    """Creates missing state, checks state, and moves it to its device, for parameters with a gradient or with state.

    Returns:
        The parameters whose state is ready.

    Raises:
        RuntimeError: the state of a parameter with a gradient is not in memory, or two of these parameters or state
            entries share memory. Nothing was changed, but parameters may have got their first state.
    """
    ready: list[StepParameter] = []
    memory: list[tuple[str, Tensor]] = []  # the tensors that the step changes, by name
    for param, parameter, gradient in zip(params, parameters, gradients, strict=True):
        if parameter.spec is None or (gradient is None and not state.get(param)):
            continue
        with ignoring_errors_without_gradient(gradient):
            local, entries = parameter.shard.local(param), parameter.spec.entries
            if gradient is None:  # else local_gradients has checked both; here the parameter stands in for a gradient
                check_tensors(parameter.name, local, local, local.device)
            residency.prepare_state(parameter.name, param, parameter.spec, state[param])
            if missing := [key for key in entries if key not in state[param]]:
                raise RuntimeError(
                    f"{parameter.name}: got state without {missing[0]}, expected {', '.join(sorted(entries))}; set the "
                    f"options when the optimizer is made, or load a state that has {missing[0]}"
                )
            ready.append(parameter)
            memory.append((parameter.name, local))
            for key in entries:
                entry = state[param][key]
                memory.append((f"{parameter.name}: the state {key}", getattr(entry, "_local_tensor", entry)))
    if found := find_overlap([tensor for _, tensor in memory]):
        first, second = (memory[index][0] for index in found)
        raise RuntimeError(
            f"{second}: got memory that it shares with {first}, expected memory of its own for each, as a step changes "
            "both at once; give each parameter to the optimizer once, and make views and tied weights of a .clone()"
        )
    return ready


def demand_finite(
    parameters: Sequence[StepParameter], gradients: Sequence[Tensor | None], groups: Sequence[Group], found_inf: object
) -> None:
    """Looks for NaN and Inf in gradients; if a rank finds one, all ranks that are linked by shared parameters raise.

    ``found_inf`` is a GradScaler's, which has looked already: only without it (None) this does. Collective among
    ranks that share parameters in groups with ``nonfinite="raise"``.

    Raises:
        FloatingPointError: a gradient has NaN or Inf, and its param group ``nonfinite="raise"``.
    """
    raising = {index for index, group in enumerate(groups) if group.nonfinite == "raise"}
    if found_inf is not None or not raising:
        return
    flags_of: dict[tuple[RankGroup | None, torch.device], list[tuple[str, Tensor]]] = {}  # by ranks that share them
    for parameter, gradient in zip(parameters, gradients, strict=True):
        holders = None if parameter.spec is None else parameter.shard.holders
        if parameter.group not in raising or (gradient is None and holders is None):
            continue  # a shared parameter may have a gradient on another rank
        flag = torch.zeros((), dtype=torch.int32, device=parameter.device)
        if gradient is not None and gradient.numel():
            low, high = torch.aminmax(gradient)  # NaN if an element is
            # high * 0 is 0, or NaN if high is infinite: the sum is finite if both are, and does not overflow.
            flag = torch.isfinite(low + high * 0).logical_not().int()
        flags_of.setdefault((holders, parameter.device), []).append((parameter.name, flag))
    is_in_several_sets = len({holders for holders, _ in flags_of if holders is not None}) > 1
    bad_names: list[str] = []
    linked: dict[RankGroup, None] = {}  # the sets in which at least one rank belongs to another set, too
    for (holders, _), named_flags in flags_of.items():
        names, flags = zip(*named_flags, strict=True)
        found = torch.stack([*flags, torch.full_like(flags[0], is_in_several_sets)])
        if holders is not None:
            holders.all_reduce_max(found)
            if found[-1]:
                linked[holders] = None
        bad_names += [name for name, is_bad in zip(names, found[:-1].tolist(), strict=True) if is_bad]
    if all_reduce_any(list(linked), bool(bad_names)):
        raise FloatingPointError(
            f"{', '.join(bad_names) or 'a parameter of other ranks'}: got a gradient with NaN or Inf; nothing was "
            "changed"
        )


def check_tensors(name: str, param: Tensor, gradient: Tensor, device: torch.device) -> None:
    """Checks that the kernels can update this rank's shard of a parameter, whose gradient has to be on ``device``.

    Raises:
        RuntimeError: the kernels have no support for the device, dtype, memory, sign, shape or strides of the parameter
            or its gradient.
    """
    check_device(name, param.device)
    if param.dtype not in DTYPES:
        supported = ", ".join(map(str, DTYPES))
        remedy = "step real and imaginary parts apart" if param.is_complex() else "cast it"
        raise RuntimeError(f"{name}: got a parameter of {param.dtype}, expected {supported}; {remedy}")
    check_storage(name, "parameter", param)
    check_sign(name, "parameter", param)
    if torch._debug_has_internal_overlap(param) == 1:  # 1: for certain, as in an expanded tensor
        raise RuntimeError(
            f"{name}: got a parameter with strides {param.stride()}, whose elements share memory, expected memory of "
            "its own for each; make the parameter of a .clone()"
        )
    check_gradient(name, gradient)
    if gradient.device != device or gradient.shape != param.shape:
        raise RuntimeError(
            f"{name}: got a gradient of shape {tuple(gradient.shape)} on {gradient.device}, "
            f"expected {tuple(param.shape)} on {device}"
        )


def check_gradient(name: str, gradient: Tensor) -> None:
    """Checks that the kernels can read a gradient, whose dtype may differ from its parameter's.

    Raises:
        RuntimeError: the gradient is sparse, of a dtype that the kernels cannot read, or not in memory.
    """
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"{name}: got a sparse gradient, expected a dense one; make it dense (e.g. nn.Embedding(sparse=False))"
        )
    if gradient.dtype not in DTYPES:
        expected = ", ".join(map(str, DTYPES))
        raise RuntimeError(f"{name}: got a gradient of {gradient.dtype}, expected {expected}; cast the gradient")
    check_storage(name, "gradient", gradient)
