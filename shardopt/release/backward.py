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
from shardopt.release.fsdp_groups import FsdpGroup, fsdp_groups
from shardopt.release.worker import WorkerTask, WorkerThread
from shardopt.state.names import param_name
from shardopt.state.warn import warn_user
from shardopt.step.stepper import Stepper


@dataclass
class _ParameterProgress:
    """One released parameter: where it is in the optimizer, and its progress within the current step."""

    name: str  # for error messages
    group: int  # index of its param group
    index_in_group: int
    index: int  # among all parameters of the optimizer
    stepper: Stepper
    gradients: int = 0  # how many it got since the optimizer's last step()
    stepped: bool = False  # whether it was stepped since the optimizer's last step()
    pending: WorkerTask | None = None  # its last step, if the worker thread takes it and nothing has waited for it yet
    read_early: bool = False  # with overlap_forward: a forward pass may have read it before its pending step was done


class BackwardRelease:
    """Steps each parameter by itself during the backward pass, as soon as its gradient is complete.

    The order of the steps does not change results: each parameter has its own step count, and the noise of stochastic
    rounding depends on the parameter's number in the model.

    Args:
        model: the wrapped model.
        params: the parameters to step.
        limit: how many steps may be in flight in the worker thread.
        micro_batches: how many gradients each parameter gets before it is stepped.

    Raises:
        ValueError: a param group has ``nonfinite="raise"``, or a rule with sums over all parameters.
    """

    overlaps_forward = False  # whether steps are taken during the next forward pass

    def __init__(
        self, optimizer: ShardedOptimizer, model: Module, params: Collection[Tensor], limit: int, micro_batches: int
    ) -> None:
        self._optimizer, self._micro_batches = optimizer, micro_batches
        self._groups: dict[Tensor, FsdpGroup] = {param: group for group in fsdp_groups(model) for param in group.params}
        self._has_gradients = False  # since the last next_step()
        self._progress: dict[Tensor, _ParameterProgress] = {}
        self.params: Collection[Tensor] = self._progress.keys()  # the parameters that the release steps
        self._worker = WorkerThread(limit)
        internals, released, index = optimizer._internals, set(params), 0
        for group_index, group in enumerate(optimizer.param_groups):
            for index_in_group, param in enumerate(group["params"]):
                if param in released:
                    check_nonfinite(group)
                    check_totals(optimizer, group)
                    name = param_name(group, group_index, index_in_group)
                    stepper = Stepper(internals, index, name)
                    self._progress[param] = _ParameterProgress(name, group_index, index_in_group, index, stepper)
                index += 1
        # A small parameter keeps a gradient of zeros until step(): its version shows clipping, but not a DTensor's.
        small = [p for p in self._progress if 0 < p.numel() <= 1 << 16 and not hasattr(p, "_local_tensor")]
        self._guarded = min(small, key=Tensor.numel, default=None)
        self._guard: Tensor | None = None

    @without_autograd
    def gradient_ready(self, param: Tensor) -> None:
        """Steps a parameter that has the gradients of all micro-batches, and frees ``.grad``: a post-accumulate hook.

        With ``offload="step"`` the worker thread takes the step, unless the step needs collectives: these must come in
        the same order on all ranks, so this thread calls them. If more parts of the gradient may come in this backward
        pass, does nothing: the call after the last part, or the optimizer's ``step()``, takes the step.

        Raises:
            RuntimeError: the parameter was stepped since the last ``step()``; or see :meth:`Stepper.prepare`.
        """
        progress = self._progress[param]
        if progress.stepped:
            self._take_guard()
            raise self._too_many_gradients(param)
        self._has_gradients = True
        if self._expects_more(param):
            return
        progress.gradients += 1
        if progress.gradients < self._micro_batches:
            return
        _wait_for_copy(param.grad)
        step = self._prepare(param, LossScaling(None, None), None)
        if self._optimizer._internals.residency.decide(param).offload == "step" and not progress.stepper.communicates:
            self._submit_step(param, step, keeps_gradient=True)
        else:
            step()
        param.grad = None
        progress.stepped = True
        if param is self._guarded:
            param.grad = self._guard = torch.zeros_like(param)

    def _too_many_gradients(self, param: Tensor) -> RuntimeError:
        """Makes the error for a gradient that comes after the last micro-batch's."""
        count = self._micro_batches
        return RuntimeError(
            f"{self._progress[param].name} {tuple(param.shape)}: got gradient {count + 1} since the last "
            f"optimizer.step(), expected {count} at most; give release_gradients() the number of micro_batches, call "
            "optimizer.zero_grad() after a pass that failed, and, if several checkpoints use the parameter, "
            "checkpoint(..., use_reentrant=False)"
        )

    def _expects_more(self, param: Tensor) -> bool:
        """Whether this backward pass may add to the gradient: fully_shard reduces one part per use of a module."""
        group = self._groups.get(param)
        return group is not None and group.expects_more

    def _prepare(self, param: Tensor, scaling: LossScaling, on_host: Tensor | None) -> Callable[[], None]:
        """Makes a parameter's state, if it has none, and prepares the step that the returned function takes.

        ``on_host`` is the gradient if it is not in ``.grad``. See :meth:`Stepper.prepare`, also for exceptions.
        """
        optimizer, group = self._optimizer, self._param_group(param)
        check_nonfinite(group)  # again, as users may have changed the option
        has_state = param in optimizer.state
        entries: dict[str, Any] = optimizer.state[param] if has_state else {}
        optimizer.prepare_groups([group])
        alone = {**group, "params": [param]}
        step = self._progress[param].stepper.prepare([alone], {param: entries}, scaling, on_host)
        if not has_state:  # only now: if prepare() raises, the optimizer has no half-made state
            optimizer.state[param] = entries
        return step

    def _param_group(self, param: Tensor) -> dict[str, Any]:
        """The current param group of a parameter: ``load_state_dict`` may have replaced the dict."""
        progress, groups = self._progress[param], self._optimizer.param_groups
        params = groups[progress.group]["params"] if progress.group < len(groups) else []
        if progress.index_in_group < len(params) and params[progress.index_in_group] is param:
            return groups[progress.group]
        raise RuntimeError(
            f"{progress.name}: got param groups in which it is no longer where it was when gradients were released; "
            "remove() the release before changing them, and release again"
        )

    def _submit_step(self, param: Tensor, step: Callable[[], None], *, keeps_gradient: bool) -> None:
        """Queues a parameter's step, which becomes its pending step; arguments as for :meth:`WorkerThread.submit`."""
        progress = self._progress[param]
        written = (param.detach(), list(self._optimizer.state[param].values()))  # kept alive until the step is done
        progress.pending = self._worker.submit(
            param.device, progress.index, step, written, keeps_gradient=keeps_gradient
        )
        # Now, not when the thread writes: if the rest of the backward pass needs the old value, autograd then raises.
        increment_version(param)

    def wait(self, *_: Any) -> None:
        """Waits for all steps in the worker thread and raises their exceptions; also a hook of state dicts' methods."""
        pending = [progress for progress in self._progress.values() if progress.pending is not None]
        self._worker.wait()
        for progress in pending:
            progress.pending = None
        self._worker.raise_errors()

    def check_step(self, closure: object, scaling: LossScaling) -> None:
        """Raises RuntimeError if ``step()`` got a closure or a loss scale: parameters are stepped before ``step()``."""
        if closure is not None:
            raise RuntimeError(
                "got a closure while gradients are released, expected step() without a closure, whose backward pass "
                "would itself be a step; call backward() before optimizer.step(), or remove() the release"
            )
        if scaling.grad_scale is not None or scaling.found_inf is not None:
            raise RuntimeError(
                "got torch.amp.GradScaler while gradients are released, expected optimizer.step(): it cannot unscale "
                "gradients that were stepped in the backward pass; release them with overlap_forward=True, train in "
                "bfloat16 without a scaler, or remove() the release"
            )
        if self._take_guard():
            raise RuntimeError(
                "got clipping while gradients are released, expected none: the backward pass had stepped them before; "
                "do not clip (Trainer: max_grad_norm=0), or release them with overlap_forward=True"
            )

    def _take_guard(self) -> bool:
        """Removes the gradient of zeros, if it is there; returns whether other code has changed it."""
        guard, self._guard = self._guard, None
        if guard is None or self._guarded is None or self._guarded.grad is not guard:
            return False
        self._guarded.grad = None
        return guard._version > 0

    def check_replica(self, replica: Any) -> None:
        """Raises RuntimeError if a DDP module that is running would reduce these gradients after they are stepped."""
        if not self._progress.keys().isdisjoint(replica._module_parameters):
            raise RuntimeError(
                "got a model that runs within DistributedDataParallel, expected the DistributedDataParallel module in "
                "release_gradients(), as gradients would be stepped before they are reduced; pass that"
            )

    def next_step(self) -> None:
        """Starts a new step: forgets which parameters got gradients and were stepped. Waits for nothing."""
        for group in set(self._groups.values()):
            group.reset_counts()
        self._take_guard()
        self._has_gradients = False
        for progress in self._progress.values():
            progress.stepped = progress.read_early = False
            progress.gradients = 0

    def discard(self) -> None:
        """Discards the current step, for ``zero_grad()``; warns of parameters that were stepped, and stay so."""
        had_gradients = self._has_gradients  # False after step(): a step in flight need not be waited for
        stepped = sum(progress.stepped for progress in self._progress.values())
        self.next_step()
        if stepped:
            warn_user(
                f"zero_grad() discards a backward pass in which {stepped} of {len(self._progress)} parameters were "
                "stepped already, as their gradients are released: they stay stepped. Load a checkpoint to go back; "
                "detach() what a backward pass is not to train",
                RuntimeWarning,
            )
        if had_gradients:
            self.wait()

    def end(self) -> None:
        """Waits for steps in flight, as the release ends."""
        self.wait()
        self._take_guard()

    def invalidate_steps(self, *, discard_gradients: bool) -> None:
        """Waits for steps in flight, and drops what steppers have cached: shards or state may have changed.

        ``discard_gradients`` also starts the current step again: after a load its gradients are of other weights.
        """
        if discard_gradients:
            self.next_step()
        self.wait()
        for progress in self._progress.values():
            progress.stepper.forget()


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

    Before PyTorch 2.13 fully_shard calls hooks once the copy is queued, and waits at the backward pass's end only.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gradient = getattr(gradient, "_local_tensor", gradient)
        if gradient is not None and gradient.device.type == "cpu" and gradient.is_pinned():
            torch.cuda.current_stream().synchronize()


def check_totals(optimizer: ShardedOptimizer, group: Mapping[str, Any]) -> None:
    """Raises ValueError if a step of the param group needs the gradients of all parameters at once."""
    if optimizer.rule(group).has_totals:
        raise ValueError(
            f"got {type(optimizer).__name__}, whose step needs sums over all gradients, expected an optimizer that can "
            "step a parameter before the gradients of others are known; use another one, or do not release gradients"
        )


def check_nonfinite(group: dict[str, Any]) -> None:
    """Raises ValueError if the param group has ``nonfinite="raise"``, which promises to step all parameters or none."""
    if group["nonfinite"] == "raise":
        raise ValueError(
            "got a param group with nonfinite='raise' while gradients are released, expected 'skip' or 'propagate': "
            "parameters would be stepped before the gradients of others are known; use 'skip', which counts"
        )
