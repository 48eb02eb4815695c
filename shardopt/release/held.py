"""Gradient release with ``overlap_forward``: gradients are held until ``step()``, whose work the next forward overlaps.

So the norm of all gradients, and whether all are finite, is known before the first step is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from shardopt import _C
from shardopt.kernels.autograd import without_autograd
from shardopt.kernels.dispatch import DTYPES, LossScaling
from shardopt.layout import Counted, shard_of
from shardopt.optim.base import ShardedOptimizer
from shardopt.release.host_gradients import HostGradient, Staging, no_share
from shardopt.release.loss_scaling import follow_loss_scalers
from shardopt.release.released import ReleasedParameters
from shardopt.state.host_memory import allocate_host_tensors, demand_host_memory
from shardopt.state.names import naming_errors
from shardopt.state.residency import ranks_here
from shardopt.state.warn import warn_user
from shardopt.step.gradient_norm import Shares
from shardopt.step.over_all import OverAll


class HeldParameters(ReleasedParameters):
    """Holds gradients until ``step()``, which then steps each parameter by itself while the next forward pass runs.

    With ``offload="step"`` gradients are copied to the host, where the CPU sums them over micro-batches and steps the
    parameters. Other gradients stay in ``.grad``, and the optimizer's ``step()`` steps these parameters at once.

    Takes the base class's arguments, but ``waiting_gradients`` limits how many copies to the host are in flight.

    Raises:
        ValueError: a param group has ``nonfinite="raise"``, or a rule with sums over all parameters.
        MemoryError: the host has too little memory for the gradients.
    """

    overlaps_forward = True

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        model: Module,
        params: Collection[Tensor],
        waiting_gradients: int,
        micro_batches: int,
    ) -> None:
        super().__init__(optimizer, model, params, waiting_gradients, micro_batches)
        residency = optimizer._internals.residency
        foreseen = residency.unallocated_bytes
        held = [param for param in params if residency.decide(param).offload == "step"]
        likes = [self._like(shard_of(param).local(param), param.dtype) for param in held]
        demand_host_memory(foreseen + sum(like.nbytes for like in likes), ranks_here())
        self._pin = next((param.device for param in held if param.device.type == "cuda"), None)
        self._gradients: dict[Tensor, HostGradient] = {}
        self._make_room(held, likes)
        self._staging = Staging(pin=self._pin is not None)
        self._wants_norm, self._has_norm = True, False  # whether the last step, this step has asked for the norm
        self.overlap: object = None  # keeps the ForwardOverlap alive, as its hooks hold weak references
        self._found: Mapping[Any, Tensor] = {}  # the loss scaler's found_inf of this step, by device
        self.is_unscaling = False  # whether GradScaler._unscale_grads_ is running

    def _like(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """A meta tensor with the shape and dtype of a gradient's sum: float32 if there are several micro-batches."""
        return torch.empty(part.shape, dtype=torch.float32 if self._micro_batches > 1 else dtype, device="meta")

    def _make_room(self, params: Iterable[Tensor], likes: Sequence[Tensor]) -> None:
        """Allocates a piece of host memory (pinned for GPUs) for gradients with the shapes and dtypes of ``likes``."""
        homes = allocate_host_tensors(likes, pin=self._pin, what="the gradients")
        for param, home in zip(params, homes, strict=True):
            self._gradients[param] = HostGradient(self._parameters[param].name, home, shard_of(param).counted())

    @without_autograd
    def step(self, param: Tensor) -> None:
        """Starts the copy of a complete gradient to the host; the optimizer's ``step()`` will step the parameter.

        Raises:
            RuntimeError: the parameter got more gradients than micro-batches since the last ``step()``; or the forward
                pass did not wait for its last step; or the gradient is sharded otherwise than the parameter, and cannot
                be redistributed.
        """
        parameter = self._parameters[param]
        if parameter.read_early or parameter.pending is not None:
            raise RuntimeError(
                f"{parameter.name} {tuple(param.shape)}: got a gradient of a value that may have been read before the "
                "last step was complete, expected the forward pass of the module that has it, within that of the "
                "model given to release_gradients(); call modules instead of reading their parameters, or leave "
                "overlap_forward out"
            )
        if any(self._found.values()):  # the loss scaler found an inf and has skipped the step: discard its gradients
            self._throw_away()
        if not self._has_gradients:
            self._has_gradients = True
            follow_loss_scalers()  # the loss has been scaled by now
        is_part, held = self._more_may_come(param), self._gradients.get(param)
        if not is_part or (held is not None and held.count):  # a part waits in .grad, unless the host has a sum
            self._take_to_host(param, is_part=is_part)

    def _take_to_host(self, param: Tensor, *, is_part: bool = False) -> None:
        """Copies a gradient to the host and clears ``.grad``; leaves sparse gradients and other dtypes in ``.grad``."""
        held, gradient = self._gradients.get(param), param.grad
        if held is None or gradient is None or gradient.layout != torch.strided:
            return
        with naming_errors(self._parameters[param].name):
            part = shard_of(param).local_gradient(gradient)
        if part.dtype not in (param.dtype, torch.float32) or param.dtype not in DTYPES:
            return
        if held.count == self._micro_batches:
            raise self._too_many(param)
        like = self._like(part, part.dtype)
        if (held.sum.shape, held.sum.dtype) != (like.shape, like.dtype):  # changed since the release
            if held.count:
                raise RuntimeError(
                    f"got a gradient of shape {tuple(part.shape)} and {part.dtype} after one for "
                    f"{tuple(held.sum.shape)} and {held.sum.dtype}, expected equal ones within a step; call "
                    "optimizer.zero_grad(), and change the model between steps only"
                )
            self.wait()
            self._make_room([param], [like])
            held = self._gradients[param]
        first, held.count = held.count == 0, held.count + (not is_part)
        held.is_lost = held.is_lost and not first
        squares = no_share() if self._wants_norm and held.count == self._micro_batches else None
        source = part.resolve_neg().contiguous()
        # Must not hold a reference to the release: it may be garbage-collected while this task is queued.
        take = partial(held.take, source, self._staging, first=first, squares=squares)
        held.arrival = self._deferred.submit(param.device, -1, take, (source, gradient), keeps_gradient=True).taken
        param.grad = None

    def wait_for(self, params: Iterable[Tensor]) -> None:
        """Waits for the pending steps of these parameters, and raises their exceptions; ignores other parameters."""
        for param in params:
            parameter = self._parameters.get(param)
            if parameter is not None:
                parameter.read_early = False
                if (step := parameter.pending) is not None:
                    step.wait()
                    parameter.pending = None
                    step.taken.result()

    def end_forward(self) -> None:
        """Waits for all steps; marks parameters whose steps no hook waited for: maybe they were read too early."""
        early = [p for p in self._parameters.values() if p.pending is not None and torch.is_grad_enabled()]
        self.wait()
        for parameter in early:
            parameter.read_early = True

    @without_autograd
    def take_rest(self) -> None:
        """Adds what is in ``.grad`` to gradients that are on the host; RuntimeError if that is a gradient too many."""
        for param in self.held:
            if param.grad is not None:  # set by hand, or accumulated while no hook was called
                self._take_to_host(param)

    def norm_shares(self, *, largest: bool) -> Shares:
        """This rank's contribution to the norm of the gradients on the host, by the ranks that share the parameters.

        Args:
            largest: whether to take the largest magnitude, which reads the gradients; otherwise the sum of squares,
                usually computed already as the gradients arrived.
        """
        self.wait()
        shares: dict[Counted | None, list[Tensor]] = {held.holders: [no_share()] for held in self._gradients.values()}
        for held in self.held.values():
            held.demand_arrival()
            shares[held.holders].append(held.share(largest=largest))
        if largest:
            return {holders: torch.stack(words).amax(0)[:1] for holders, words in shares.items()}
        self._has_norm = True
        return {holders: torch.stack(words).sum(0) for holders, words in shares.items()}

    @property
    def held(self) -> Mapping[Tensor, HostGradient]:
        """The gradients of this step that are on the host, or being copied there, by their parameters."""
        return {param: held for param, held in self._gradients.items() if held.count}

    @without_autograd
    def unscale(self, factor: Tensor, found: dict[Any, Tensor], found_inf: Tensor, *, allow_fp16: bool) -> None:
        """Unscales the gradients on the host, which torch.amp.GradScaler does not find, and checks for inf and NaN.

        Args:
            factor: the inverse loss scale, one element.
            found: GradScaler's flags by device, set to 1 here if a gradient on the host is not finite on any rank.
            found_inf: GradScaler's initial flag, from which new flags are made.
            allow_fp16: whether float16 gradients may be multiplied, and so rounded again; otherwise ValueError.
        """
        if not allow_fp16 and any(held.sum.dtype == torch.float16 for held in self.held.values()):
            raise ValueError(
                "got float16 gradients in GradScaler.unscale_, expected gradients that are not rounded once more; use "
                "float32 parameters and torch.autocast, or leave unscale_ out: scaler.step(optimizer) unscales exactly"
            )
        shares = {holders: [words] for holders, words in self.norm_shares(largest=False).items()}
        holders_of_all = (shard_of(param).counted() for param in self._parameters)
        total = OverAll(holders_of_all).total(shares, no_share(), largest=False)
        is_finite = math.isfinite(_C.sum_value(total.numpy()))
        for device in {param.device for param in self._parameters}:
            flag = torch.full_like(found_inf, not is_finite, device=device)
            found[device] = torch.maximum(found.get(device, flag), flag)
        if float(factor) != 1.0:
            for held in self.held.values():
                held.sum.mul_(float(factor))
                held.squares = None
        self._found = found

    def begin_replica(self, replica: Any, args: Any) -> None:
        """Waits until copies to the host have read DDP's buckets, which the next pass overwrites; then see the base."""
        wait([held.arrival for held in self._gradients.values() if held.arrival is not None])
        super().begin_replica(replica, args)

    def prepare_steps(self, scaling: LossScaling) -> Callable[[], None]:
        """Prepares the steps of all parameters whose gradients are on the host.

        Returns:
            A function that starts them: in the worker thread, or at once in this thread if a step needs collectives.

        Raises:
            RuntimeError, ValueError: see :meth:`Stepper.prepare`. Nothing was changed.
        """
        self.take_rest()
        steps: dict[Tensor, Callable[[], None]] = {}
        gradients = self.held
        if gradients:  # read the scalars from the device once, not per parameter
            scaling = LossScaling(*(None if scalar is None else scalar.cpu() for scalar in scaling))
        for param, held in gradients.items():
            if held.is_lost:
                self.wait()  # raises the exception, unless somebody has seen it
                held.demand_arrival()
            steps[param] = self._prepare(param, scaling, held.sum)

        def take() -> None:
            for param, step in steps.items():
                held = self._gradients[param]
                if self._parameters[param].stepper.communicates:
                    self.wait()
                    step()
                else:
                    self._defer(param, partial(held.step, step), keeps_gradient=False)
                held.count = 0

        return take

    def next_step(self) -> None:
        """Starts a new step: resets counts, discards gradients on the host, notes whether the norm was asked for."""
        if self._has_gradients:
            self._wants_norm, self._has_norm = self._has_norm, False
        super().next_step()
        self._throw_away()

    def _throw_away(self) -> None:  # discards the gradients on the host; their memory is reused
        self._found = {}
        for held in self._gradients.values():
            held.count = 0

    def end(self) -> None:
        """Waits for steps in flight, and warns if gradients on the host are lost, as step() has not used them."""
        super().end()
        if left := len(self.held):
            warn_user(
                f"remove() throws away the gradients of {left} parameters that backward() gave since the last "
                "optimizer.step(); call optimizer.step() before",
                RuntimeWarning,
            )

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are allocated for gradients and for staging their copies."""
        return sum(held.sum.nbytes for held in self._gradients.values()) + self._staging.nbytes
