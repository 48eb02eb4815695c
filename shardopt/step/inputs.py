"""Description and checks of the parameters and gradients of a step, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.kernels.dispatch import DTYPES, check_device
from shardopt.kernels.memory import check_sign, check_storage, sharing_memory
from shardopt.layout import (
    Copies,
    Exchange,
    FlatBuffer,
    Shard,
    UnknownShardError,
    assigned,
    number_of,
    on_any_rank,
    use_numbers,
)
from shardopt.state.names import listed_name, named
from shardopt.state.residency import StateResidency
from shardopt.state.tensor_state import TensorState, tensor_state_of
from shardopt.state.warn import warn_user
from shardopt.step.rows import Group

ParamGroups = Sequence[Mapping[str, Any]]


class Input(NamedTuple):
    """A parameter of the optimizer, as a step needs to know it.

    Attributes:
        name: the parameter's name in errors.
        group: index of the param group.
        position: index in the param group.
        device: device of the parameter's memory.
        spec: describes the parameter's state; None for a parameter without gradient that cannot be stepped.
        number: index among all of the model's parameters, on which stochastic rounding depends.
        copies: ranks that hold copies of the parameter and share the work on it; None without such ranks.
        gradient_on_host: whether the gradient is in the host's memory, for a parameter with ``offload="step"`` whose
            attribute ``grad`` is None.
    """

    name: str
    group: int
    position: int
    device: torch.device
    spec: TensorState | None
    number: int
    copies: Copies | None
    gradient_on_host: bool

    @property
    def shard(self) -> Shard:
        """The part of the parameter that this rank holds."""
        assert self.spec is not None
        return self.spec.shard


def describe(
    param_groups: ParamGroups,
    groups: Sequence[Group],
    numbers: Mapping[Tensor, int],
    copies: Mapping[Tensor, Copies],
    first: int,
    name: str | None,
    gradient_on_host: bool,
) -> list[Input]:
    """Describes all parameters of a step.

    Args:
        param_groups: the optimizer's param groups, or similar ones of some of its parameters.
        groups: one per param group.
        numbers: indices of the parameters among all of the model's, if the optimizer has only some of them.
        copies: the parameters of which other ranks hold copies and whose work the ranks share.
        first: index of the first parameter among all of the optimizer's.
        name: the name in errors of a single parameter that is not the param group's first.
        gradient_on_host: whether the gradient of a single parameter is in the host's memory.

    Raises:
        RuntimeError: the shard of a parameter is not known, or a parameter with a gradient is sharded in a way that the
            kernels cannot step.
        ValueError: the weight format that the options ask for does not fit the dtype of a parameter with a gradient.
    """
    inputs: list[Input] = []
    params = [param for group in param_groups for param in group["params"]]
    are_numbered = any(number_of(param) is not None for param in params)
    if are_numbered:  # some may have come into the groups by assignment
        use_numbers(param for param in params if number_of(param) is None)
    for index, group in enumerate(param_groups):
        for position, param in enumerate(group["params"]):
            try:
                spec = tensor_state_of(param, group, groups[index].rule.moments)
            except UnknownShardError:
                raise  # even on ranks without a gradient, for which other ranks would wait
            except (RuntimeError, ValueError):
                if param.grad is not None or gradient_on_host:
                    raise
                spec = None
            known_as = name or listed_name(group, index, position)
            if spec is not None:
                known_as = f"{known_as} {spec.shard.global_shape}"
            number = number_of(param)
            if number is None:
                number = numbers.get(param, first + len(inputs))
                is_random = spec is not None and any(part.is_random for part in spec.slices)
                if are_numbered and is_random and not isinstance(assigned(param), FlatBuffer):
                    warn_user(
                        f"{known_as}: got a parameter without a number in the model, unlike others, to be rounded at "
                        "random, so that its noise depends on its place in the optimizer; call optimizer.attach(model)",
                        RuntimeWarning,
                    )
            shared = copies.get(param)
            inputs.append(Input(known_as, index, position, param.device, spec, number, shared, gradient_on_host))
    _check_noise(inputs)
    return inputs


def _check_noise(inputs: Sequence[Input]) -> None:
    """Checks that the parameters' indices in the model are known if flat buffers are rounded at random.

    Raises:
        UnknownShardError: the step has parameters of a model that was never seen as a whole.
    """
    params = sum(1 if p.spec is None else len(p.spec.slices) for p in inputs)
    for parameter in inputs:
        spec, name = parameter.spec, parameter.name
        if spec is not None and isinstance(spec.shard, FlatBuffer) and any(s.is_random for s in spec.slices):
            known = spec.shard.known_params
            if known is not None and known < params:
                raise UnknownShardError(
                    f"{name}: got flat parameters of a part of the model for rounding at random, expected a model that "
                    "is known as a whole, as the noise depends on the parameters' places in it; call "
                    "optimizer.attach(model) with the whole model, or set use_orig_params=True"
                )


def local_gradients(params: Sequence[Tensor], inputs: Sequence[Input], on_host: Tensor | None) -> list[Tensor | None]:
    """This rank's parts of all gradients, checked. May run collectives, unless they are in the host's memory.

    Args:
        params: all parameters of the step.
        inputs: one per parameter.
        on_host: this rank's part of the gradient of a single parameter, in the host's memory.

    Raises:
        RuntimeError: the kernels cannot step a parameter or its gradient.
    """
    gradients: list[Tensor | None] = []
    for param, parameter in zip(params, inputs, strict=True):
        part = on_host if param.grad is None else None
        if part is not None:
            with named(parameter.name):
                local = parameter.shard.local(param)
            check_tensors(parameter.name, local, part, torch.device("cpu"))
        elif param.grad is not None:
            if param.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{parameter.name}: got a sparse gradient, expected a dense one; make it dense (e.g. "
                    "nn.Embedding(sparse=False))"
                )
            with named(parameter.name):
                local = parameter.shard.local(param)
            part = local_gradient(inputs, len(gradients), param.grad)
            check_tensors(parameter.name, local, part, local.device)
        gradients.append(part)
    return gradients


def local_gradient(inputs: Sequence[Input], index: int, gradient: Tensor) -> Tensor:
    """This rank's part of a parameter's gradient, with memory of its own. May run collectives.

    Raises:
        RuntimeError: the gradient is not sharded over the parameter's ranks, or cannot be copied to memory.
    """
    with named(inputs[index].name):
        return inputs[index].shard.local_gradient(gradient)


@contextmanager
def unless_idle(gradient: Tensor | None) -> Iterator[None]:
    """Leaves the errors of a parameter without a gradient to the step in which the parameter has one."""
    try:
        yield
    except RuntimeError as error:
        if gradient is not None or isinstance(error, torch.OutOfMemoryError):
            raise


def ready_states(
    params: Sequence[Tensor],
    state: Any,
    inputs: Sequence[Input],
    gradients: Sequence[Tensor | None],
    residency: StateResidency,
) -> list[int]:
    """Readies the state of parameters with a gradient, and of those without that were stepped before.

    Args:
        params: all parameters of the step.
        state: the optimizer's state.
        inputs: one per parameter.
        gradients: this rank's parts; None for a parameter without gradient.
        residency: where the state of each parameter lives.

    Returns:
        The indices of the parameters whose state is ready.

    Raises:
        RuntimeError: the state of a parameter with a gradient is not in memory. Parameters before it may have got
            their first state.
    """
    ready = []
    for index, (param, parameter, gradient) in enumerate(zip(params, inputs, gradients, strict=True)):
        if parameter.spec is None or (gradient is None and not state.get(param)):
            continue
        with unless_idle(gradient):
            if gradient is None:
                local = parameter.shard.local(param)
                check_tensors(parameter.name, local, local, local.device)
            residency.ready(parameter.name, param, parameter.spec, state[param])
            ready.append(index)
    return ready


def demand_apart(params: Sequence[Tensor], state: Any, inputs: Sequence[Input], ready: Sequence[int]) -> None:
    """Checks that no two of the parameters whose state is ready have memory in common, nor two of their state entries.

    Raises:
        RuntimeError: two share memory. Nothing was changed, but parameters may have got their first state.
    """
    memory: list[Tensor] = []
    names: list[str] = []
    for index in ready:
        parameter, param = inputs[index], params[index]
        memory.append(parameter.shard.local(param))
        names.append(parameter.name)
        for key, entry in state[param].items():
            if parameter.spec is not None and key in parameter.spec.state_names:
                memory.append(getattr(entry, "_local_tensor", entry))
                names.append(f"{parameter.name}: the state {key}")
    found = sharing_memory(memory)
    if found is not None:
        first, second = (names[index] for index in found)
        raise RuntimeError(
            f"{second}: got memory that it shares with {first}, expected memory of its own for each, as a step changes "
            "both at once; give each parameter to the optimizer once, and make views and tied weights of a .clone()"
        )


def raising(groups: Sequence[Group]) -> frozenset[int]:
    """The indices of the param groups with ``nonfinite="raise"``."""
    return frozenset(index for index, group in enumerate(groups) if group.nonfinite == "raise")


def demand_finite(
    inputs: Sequence[Input], gradients: Sequence[Tensor | None], groups: Sequence[Group], looked_at: Set[int]
) -> None:
    """Looks for NaN and Inf in gradients; raises on all ranks that share parameters, directly or by way of others.

    Args:
        inputs: the parameters. Ranks that share parameters pass the same parameters.
        gradients: this rank's parts of the gradients.
        groups: one per param group.
        looked_at: the indices of the param groups whose gradients are looked at, equal on all ranks.

    Raises:
        FloatingPointError: a gradient has NaN or Inf, and its param group ``nonfinite="raise"``.
    """
    if not looked_at:
        return
    flags_of: dict[tuple[Exchange | None, torch.device], list[tuple[Input, Tensor]]] = {}
    for parameter, gradient in zip(inputs, gradients, strict=True):
        is_shared = parameter.spec is not None and parameter.shard.holders is not None
        if parameter.group not in looked_at or (gradient is None and not is_shared):
            continue  # a shared parameter may have a gradient on another rank
        flag = torch.zeros((), dtype=torch.int32, device=parameter.device)
        if gradient is not None and gradient.numel():
            low, high = torch.aminmax(gradient)
            flag = torch.isfinite(low + high * 0).logical_not().int()
        flags_of.setdefault((parameter.shard.holders, parameter.device), []).append((parameter, flag))
    sets = {holders for holders, _ in flags_of if holders is not None}
    bad: list[str] = []
    linked: dict[Exchange, None] = {}  # the sets of ranks of which a rank is in another set, too
    for (holders, _), flagged in flags_of.items():
        flags = torch.stack([flag for _, flag in flagged] + [torch.full_like(flagged[0][1], len(sets) > 1)])
        if holders is not None:
            holders.all_reduce_max(flags)
            if flags[-1]:
                linked[holders] = None
        nonfinite = (parameter for (parameter, _), flag in zip(flagged, flags[:-1].tolist(), strict=True) if flag)
        bad += [parameter.name for parameter in nonfinite if groups[parameter.group].nonfinite == "raise"]
    if on_any_rank(list(linked), bool(bad), rounds=2):
        names = ", ".join(bad) or "a parameter of other ranks"
        raise FloatingPointError(f"{names}: got a gradient with NaN or Inf; nothing was changed")


def check_tensors(name: str, param: Tensor, gradient: Tensor, device: torch.device) -> None:
    """Checks that the kernels can step this rank's part of a parameter, whose gradient is to be on ``device``.

    Raises:
        RuntimeError: the kernels have no support for the device, dtype, memory, sign, shape or strides of the parameter
            or its gradient.
    """
    check_device(name, param.device)
    supported = ", ".join(str(dtype) for dtype in DTYPES)
    for role, tensor in (("parameter", param), ("gradient", gradient)):
        if tensor.dtype not in DTYPES:
            remedy = "step real and imaginary parts apart" if tensor.is_complex() else "cast it"
            raise RuntimeError(f"{name}: got a {role} of {tensor.dtype}, expected {supported}; {remedy}")
        check_storage(name, role, tensor)
    check_sign(name, "parameter", param)
    if _may_overlap(param):
        raise RuntimeError(
            f"{name}: got a parameter with strides {param.stride()}, whose elements share memory, expected memory of "
            "its own for each; make the parameter of a .clone()"
        )
    if gradient.device != device or gradient.shape != param.shape:
        raise RuntimeError(
            f"{name}: got a gradient of shape {tuple(gradient.shape)} on {gradient.device}, "
            f"expected {tuple(param.shape)} on {device}"
        )
    if gradient.dtype not in (param.dtype, torch.float32):
        raise RuntimeError(
            f"{name}: got a gradient of {gradient.dtype} for a parameter of {param.dtype}, "
            "expected the same dtype or float32; cast the gradient"
        )


def _may_overlap(tensor: Tensor) -> bool:
    """Whether elements may share memory, as in an expanded tensor: one dimension steps within another."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
