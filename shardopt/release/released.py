"""Gradient release without ``overlap_forward``: each parameter is stepped as soon as its gradient is complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version
from torch.nn import Module

from shardopt.kernels.autograd import without_autograd
from shardopt.kernels.dispatch import LossScaling
from shardopt.optim.base import ShardedOptimizer
from shardopt.release.deferred import DeferredStep, DeferredSteps
from shardopt.release.fsdp_groups import FsdpGroup, fsdp_groups
from shardopt.state.names import param_name
from shardopt.state.warn import warn_user
from shardopt.step.stepper import Stepper


@dataclass
class _Parameter:
    """The record of one released parameter: its place in the optimizer, and its progress within the current step.

    Attributes:
        name: the parameter's name in error messages.
        group: the index of its param group.
        position: its index within the group.
        index: its index among all parameters of the optimizer.
        stepper: prepares and takes its steps.
        gradients: how many gradients it got since the optimizer's last ``step()``.
        stepped: whether it was stepped since the optimizer's last ``step()``.
        pending: its last step, if the worker thread takes it and nothing has waited for it yet.
        read_early: whether a forward pass may have read the parameter before its pending step was done.
    """

    name: str
    group: int
    position: int
    index: int
    stepper: Stepper
    gradients: int = 0
    stepped: bool = False
    pending: DeferredStep | None = None
    read_early: bool = False


class ReleasedParameters:
    """Steps each parameter by itself during the backward pass, as soon as its gradient is complete.

    The order of the steps does not change results: each parameter has its own step count, and the noise of stochastic
    rounding depends on the parameter's index in the optimizer.

    Args:
        optimizer: the optimizer that has the parameters.
        model: the wrapped model.
        params: the parameters to step.
        waiting_gradients: how many steps may be in flight in the worker thread.
        micro_batches: how many gradients each parameter gets before it is stepped.

    Raises:
        ValueError: a param group has ``nonfinite="raise"``, or a rule with sums over all parameters.
    """

    #: Whether steps are taken during the next forward pass.
    overlaps_forward = False

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        model: Module,
        params: Collection[Tensor],
        waiting_gradients: int,
        micro_batches: int,
    ) -> None:
        self._optimizer, self._micro_batches = optimizer, micro_batches
        self._groups: dict[Tensor, FsdpGroup] = {param: group for group in fsdp_groups(model) for param in group.params}
        self._has_gradients = False  # since the last next_step()
        self._parameters: dict[Tensor, _Parameter] = {}
        self._deferred = DeferredSteps(waiting_gradients)
        internals, wanted, index_in_model = optimizer._internals, set(params), 0
        for index, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if param in wanted:
                    demand_no_raise(group)
                    demand_no_totals(optimizer, group)
                    name = param_name(group, index, position)
                    stepper = Stepper(internals, index_in_model, name)
                    self._parameters[param] = _Parameter(name, index, position, index_in_model, stepper)
                index_in_model += 1

    @without_autograd
    def step(self, param: Tensor) -> None:
        """Takes the step of a parameter whose gradient is complete, and frees the gradient: a post-accumulate hook.

        With ``offload="step"`` the worker thread takes the step, unless the step needs collectives: these must come in
        the same order on all ranks, so this thread calls them. If more parts of the gradient may come in this backward
        pass, does nothing: the call after the last part, or the optimizer's ``step()``, takes the step.

        Raises:
            RuntimeError: the parameter was stepped since the last ``step()``; or see :meth:`Stepper.prepare`.
        """
        parameter = self._parameters[param]
        if parameter.stepped:
            raise self._too_many(param)
        self._has_gradients = True
        if self._more_may_come(param):
            return
        parameter.gradients += 1
        if parameter.gradients < self._micro_batches:
            return
        _wait_for_copy(param.grad)
        step = self._prepare(param, LossScaling(None, None), None)
        if self._optimizer._internals.residency.decide(param).offload == "step" and not parameter.stepper.communicates:
            self._defer(param, step, keeps_gradient=True)
        else:
            step()
        param.grad = None
        parameter.stepped = True

    def _too_many(self, param: Tensor) -> RuntimeError:
        count = self._micro_batches
        return RuntimeError(
            f"{self._parameters[param].name} {tuple(param.shape)}: got gradient {count + 1} since the last "
            f"optimizer.step(), expected {count} at most; give release_gradients() the number of micro_batches, call "
            "optimizer.zero_grad() after a pass that failed, and, if several checkpoints use the parameter, "
            "checkpoint(..., use_reentrant=False)"
        )

    def _more_may_come(self, param: Tensor) -> bool:
        """Whether this backward pass may add to the gradient: fully_shard reduces one part per use of a module."""
        group = self._groups.get(param)
        return group is not None and group.expects_more

    def _prepare(self, param: Tensor, scaling: LossScaling, on_host: Tensor | None) -> Callable[[], None]:
        """Checks and prepares a parameter's step, which the returned function takes; see :meth:`Stepper.prepare`."""
        optimizer, parameter = self._optimizer, self._parameters[param]
        group = self._group_of(param)
        demand_no_raise(group)
        known = optimizer.state.get(param)
        entries: dict[str, Any] = {} if known is None else known
        optimizer.begin_step([group])
        view = {**group, "params": [param]}
        step = parameter.stepper.prepare([view], {param: entries}, scaling, on_host)
        if known is None:
            optimizer.state[param] = entries
        return step

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        """The current param group of a parameter: ``load_state_dict`` may have replaced the dict."""
        parameter, groups = self._parameters[param], self._optimizer.param_groups
        params = groups[parameter.group]["params"] if parameter.group < len(groups) else []
        if parameter.position < len(params) and params[parameter.position] is param:
            return groups[parameter.group]
        raise RuntimeError(
            f"{parameter.name} {tuple(param.shape)}: got param groups in which it is no longer where it was when "
            "gradients were released; remove() the release before changing them, and release again"
        )

    def _defer(self, param: Tensor, step: Callable[[], None], *, keeps_gradient: bool) -> None:
        """Queues a step for the worker thread, and records it as the parameter's pending step."""
        parameter = self._parameters[param]
        number = 0 if keeps_gradient else parameter.index
        keeps = (param.detach(), list(self._optimizer.state[param].values()))  # memory that the step writes
        parameter.pending = self._deferred.submit(param.device, number, step, keeps, keeps_gradient=keeps_gradient)
        increment_version(param)  # now, too: a backward pass that goes on may still need the old value

    def wait(self, *_: Any) -> None:
        """Waits for all steps in the worker thread and raises their exceptions; also a hook of state dicts' methods."""
        pending = [parameter for parameter in self._parameters.values() if parameter.pending is not None]
        self._deferred.wait()
        for parameter in pending:
            parameter.pending = None
        self._deferred.check()

    def check_step(self, closure: object, scaling: LossScaling) -> None:
        """Raises RuntimeError if ``step()`` got a closure or a loss scale: parameters are stepped before ``step()``."""
        if closure is not None:
            raise RuntimeError(
                "got a closure while gradients are released, expected step() without a closure, whose backward pass "
                "would itself be a step; call backward() before optimizer.step(), or remove() the release"
            )
        if scaling.grad_scale is not None or scaling.found_inf is not None:
            raise RuntimeError(
                "got torch.amp.GradScaler while gradients are released, expected optimizer.step(): it does not find "
                "gradients that were stepped during the backward pass, and cannot unscale them; release them with "
                "overlap_forward=True, train in bfloat16 without a scaler, or remove() the release"
            )

    def begin_replica(self, replica: Any, args: Any) -> None:
        """Raises RuntimeError within DDP's ``join()``: a forward pre-hook of DDP, before it prepares its reductions."""
        if replica._join_config.enable:
            raise RuntimeError(
                "got join() of DistributedDataParallel while gradients are released, expected the same number of "
                "batches on all ranks; leave join() out, or remove() the release"
            )

    def check_replica(self, replica: Any) -> None:
        """Raises RuntimeError if the model runs within a DDP that reduces gradients after they are stepped."""
        if not self._parameters.keys().isdisjoint(replica._module_parameters):
            raise RuntimeError(
                "got a model that runs within DistributedDataParallel while gradients are released, expected the "
                "wrapped model in release_gradients(): they would be stepped before they are reduced; pass the "
                "DistributedDataParallel module"
            )

    def next_step(self) -> None:
        """Starts a new step: resets counts of gradients, so that each parameter can be stepped again."""
        for group in set(self._groups.values()):
            group.restart()
        self._has_gradients = False
        for parameter in self._parameters.values():
            parameter.stepped = parameter.read_early = False
            parameter.gradients = 0

    def discard(self) -> None:
        """Discards the current step, for ``zero_grad()``: warns if some parameters were stepped, which stays so."""
        had_gradients = self._has_gradients
        stepped = sum(parameter.stepped for parameter in self._parameters.values()) if had_gradients else 0
        self.next_step()
        if stepped:
            warn_user(
                f"zero_grad() discards a backward pass in which {stepped} of {len(self._parameters)} parameters were "
                "stepped already, as their gradients are released: they stay stepped. Load a checkpoint to go back; "
                "detach() what a backward pass is not to train",
                RuntimeWarning,
            )
        if had_gradients:
            self.wait()

    def end(self) -> None:
        """Waits for steps in flight, as the release ends."""
        self.wait()

    @property
    def params(self) -> Collection[Tensor]:
        """The parameters that the release steps."""
        return self._parameters.keys()

    def forget(self, *, anew: bool) -> None:
        """Drops what steppers cached about parameters and state; with ``anew`` also starts a new step."""
        if anew:
            self.next_step()
        self.wait()
        for parameter in self._parameters.values():
            parameter.stepper.forget()


class Hook:
    """A hook that calls a method through a weak reference, as hooks in PyTorch's C++ would never be garbage-collected.

    Does nothing once the object is gone. Copied and unpickled hooks do nothing: a copy of a model has no release.
    """

    def __init__(self, method: Callable[..., object] | None = None) -> None:
        self._method = (lambda: None) if method is None else WeakMethod(method)

    @_disable_dynamo  # forward and backward passes within compiled functions call it, too
    def __call__(self, *args: Any) -> None:
        method = self._method()
        if method is not None:
            method(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def _wait_for_copy(gradient: Tensor | None) -> None:
    """Waits for a gradient that fully_shard's ``CPUOffloadPolicy`` may be copying to pinned memory in this stream.

    Before PyTorch 2.13 it calls hooks as soon as the copy is queued, and waits at the end of the backward pass only.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gradient = getattr(gradient, "_local_tensor", gradient)
        if gradient is not None and gradient.device.type == "cpu" and gradient.is_pinned():
            torch.cuda.current_stream().synchronize()


def demand_no_totals(optimizer: ShardedOptimizer, group: Mapping[str, Any]) -> None:
    """Raises ValueError if a step of the param group needs the gradients of all parameters at once."""
    if optimizer.rule(group).has_totals:
        raise ValueError(
            f"got {type(optimizer).__name__}, whose step needs sums over all gradients, expected an optimizer that can "
            "step a parameter before the gradients of others are known; use another one, or do not release gradients"
        )


def demand_no_raise(group: dict[str, Any]) -> None:  # ValueError if it promises a step for all parameters or none
    if group["nonfinite"] == "raise":
        raise ValueError(
            "got a param group with nonfinite='raise' while gradients are released, expected 'skip' or 'propagate': "
            "parameters would be stepped before the gradients of others are known; use 'skip', which counts"
        )
