"""Parameters whose gradients are held until the optimizer's ``step()``, and which the next forward pass finds stepped.

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
from shardopt.state.host_memory import demand_memory, make_homes
from shardopt.state.names import named
from shardopt.state.residency import ranks_here
from shardopt.state.warn import warn_user
from shardopt.step.gradient_norm import Shares
from shardopt.step.over_all import OverAll


class HeldParameters(ReleasedParameters):
    """The parameters of an optimizer that are stepped by themselves, during the next forward pass.

    Gradients of parameters with ``offload="step"`` are held in the host's memory, where the CPU adds them up and steps
    the parameters. Others stay where they are, and the optimizer's ``step()`` steps these parameters at once.

    Arguments are those of the base class: ``waiting_gradients`` is how many may be on their way to the host.

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
        foreseen = residency.foreseen_bytes
        held = [param for param in params if residency.of(param).offload == "step"]
        likes = [self._like(shard_of(param).local(param), param.dtype) for param in held]
        demand_memory(foreseen + sum(like.nbytes for like in likes), ranks_here())
        self._pin = next((param.device for param in held if param.device.type == "cuda"), None)
        self._gradients: dict[Tensor, HostGradient] = {}
        self._make_room(held, likes)
        self._staging = Staging(pin=self._pin is not None)
        self._wants_norm, self._has_norm = True, False  # whether the norm will be asked for; was, in this step
        self.overlap: object = None  # whose hooks do not keep it
        self._found: Mapping[Any, Tensor] = {}  # by a loss scaler: flags of this step's gradients that are not finite
        self.is_unscaling = False  # whether a loss scaler looks at gradients right now

    def _like(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor without memory for the sum of gradients of a dtype: several are added up in float32."""
        return torch.empty(part.shape, dtype=torch.float32 if self._micro_batches > 1 else dtype, device="meta")

    def _make_room(self, params: Iterable[Tensor], likes: Sequence[Tensor]) -> None:
        """Makes memory for the gradients of parameters, of these shapes and dtypes, in one piece."""
        homes = make_homes(likes, pin=self._pin, what="the gradients")
        for param, home in zip(params, homes, strict=True):
            self._gradients[param] = HostGradient(self._parameters[param].name, home, shard_of(param).counted())

    @without_autograd
    def step(self, param: Tensor) -> None:
        """Takes a gradient that is complete to the host's memory; the optimizer's ``step()`` has it stepped.

        Raises:
            RuntimeError: it is one too many since the optimizer's last ``step()``; or the forward pass has not waited
                for the parameter's last step; or ranks hold other parts of the gradient than of the parameter, and it
                cannot be redistributed.
        """
        parameter = self._parameters[param]
        if parameter.read_early or parameter.pending is not None:
            raise RuntimeError(
                f"{parameter.name} {tuple(param.shape)}: got a gradient of a value that may have been read before the "
                "last step was complete, expected the forward pass of the module that has it, within that of the "
                "model given to release_gradients(); call modules instead of reading their parameters, or leave "
                "overlap_forward out"
            )
        if any(self._found.values()):  # the loss scaler has left the step out
            self._throw_away()
        if not self._has_gradients:
            self._has_gradients = True
            follow_loss_scalers()  # the loss has been scaled by now
        is_part, held = self._more_may_come(param), self._gradients.get(param)
        if not is_part or (held is not None and held.count):  # parts go where the step's first gradient is
            self._take_to_host(param, is_part=is_part)

    def _take_to_host(self, param: Tensor, *, is_part: bool = False) -> None:
        """Copies a gradient to the host and clears ``.grad``; leaves sparse ones and other dtypes to ``step()``."""
        held, gradient = self._gradients.get(param), param.grad
        if held is None or gradient is None or gradient.layout != torch.strided:
            return
        with named(self._parameters[param].name):
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
        """Waits until pending steps of these parameters are complete; ignores parameters that are not released."""
        for param in params:
            parameter = self._parameters.get(param)
            if parameter is not None:
                parameter.read_early = False
                if (step := parameter.pending) is not None:
                    step.wait()
                    parameter.pending = None
                    step.taken.result()

    def end_forward(self) -> None:
        """Waits for all steps; notes for which of them nobody has waited until now."""
        early = [p for p in self._parameters.values() if p.pending is not None and torch.is_grad_enabled()]
        self.wait()
        for parameter in early:
            parameter.read_early = True

    @without_autograd
    def take_rest(self) -> None:
        """Takes to the host what ``.grad`` has of gradients that are partly there; RuntimeError if it is too many."""
        for param in self.held:
            if param.grad is not None:  # set by hand, or accumulated while no hook was called
                self._take_to_host(param)

    def norm_shares(self, *, largest: bool) -> Shares:
        """The shares of the norm of the gradients that are held in the host's memory.

        Args:
            largest: of the largest magnitude, which takes a pass over the gradients; otherwise of the root of the sum
                of squares, which were taken as the gradients came.
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
        """The gradients that are held in the host's memory now, by their parameters."""
        return {param: held for param, held in self._gradients.items() if held.count}

    @without_autograd
    def unscale(self, factor: Tensor, found: dict[Any, Tensor], found_inf: Tensor, *, allow_fp16: bool) -> None:
        """Multiplies the gradients in the host's memory, as torch.amp.GradScaler does others.

        Args:
            factor: of one element.
            found: by devices of parameters, 1 if a gradient is not finite, on any rank that has parts of held ones.
            found_inf: 0, as ``found`` has it.
            allow_fp16: whether float16 gradients may be rounded once more; otherwise they raise ValueError.
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
        """Waits, too, until gradients have left DDP's buckets; exceptions are left to whoever needs the gradients."""
        wait([held.arrival for held in self._gradients.values() if held.arrival is not None])
        super().begin_replica(replica, args)

    def prepare_steps(self, scaling: LossScaling) -> Callable[[], None]:
        """Prepares the steps of the parameters whose gradients are in the host's memory.

        Returns:
            A function that has them taken: in the other thread, or here if they take collectives.

        Raises:
            RuntimeError, ValueError: see :meth:`Stepper.prepare`. Nothing was changed.
        """
        self.take_rest()
        steps: dict[Tensor, Callable[[], None]] = {}
        gradients = self.held
        if gradients:  # read from the device once
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
        """Lets each parameter be stepped once more, and throws gradients away."""
        if self._has_gradients:
            self._wants_norm, self._has_norm = self._has_norm, False
        super().next_step()
        self._throw_away()

    def _throw_away(self) -> None:
        self._found = {}
        for held in self._gradients.values():
            held.count = 0

    def end(self) -> None:
        """Ends the release; warns of gradients that are thrown away."""
        super().end()
        if left := len(self.held):
            warn_user(
                f"remove() throws away the gradients of {left} parameters that backward() gave since the last "
                "optimizer.step(); call optimizer.step() before",
                RuntimeWarning,
            )

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory for gradients, held now or not."""
        return sum(held.sum.nbytes for held in self._gradients.values()) + self._staging.nbytes
