"""Gradient release with ``overlap_forward``: gradients wait for ``step()``, whose work the next forward pass overlaps.

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
from shardopt.layout import HoldersForSums, shard_of
from shardopt.optim.base import ShardedOptimizer
from shardopt.release.backward import BackwardRelease
from shardopt.release.host_gradients import HostGradient, Staging, zero_share
from shardopt.release.loss_scaling import patch_loss_scalers
from shardopt.state.host_memory import allocate_host_tensors, demand_host_memory
from shardopt.state.names import naming_errors
from shardopt.state.residency import ranks_here
from shardopt.state.warn import warn_user
from shardopt.step.gradient_norm import Shares
from shardopt.step.over_all import OverAll


class OverlappedRelease(BackwardRelease):
    """Keeps gradients until ``step()``, which then steps each parameter by itself while the next forward pass runs.

    With ``offload="step"`` gradients are copied to the host, where the CPU sums them over micro-batches and steps the
    parameters. Other gradients stay in ``.grad``, and the optimizer's ``step()`` steps these parameters at once.

    Arguments are the base class's, but ``limit`` is how many copies to the host may be in flight. Raises MemoryError if
    the host has too little memory for the gradients.
    """

    overlaps_forward = True

    def __init__(
        self, optimizer: ShardedOptimizer, model: Module, params: Collection[Tensor], limit: int, micro_batches: int
    ) -> None:
        super().__init__(optimizer, model, params, limit, micro_batches)
        residency = optimizer._internals.residency
        state_bytes = residency.unallocated_bytes  # read before decide(), which allocates the state's memory
        offloaded = [param for param in params if residency.decide(param).offload == "step"]
        likes = [self._sum_like(shard_of(param).local(param), param.dtype) for param in offloaded]
        demand_host_memory(state_bytes + sum(like.nbytes for like in likes), ranks_here())
        self._gpu = next((param.device for param in offloaded if param.device.type == "cuda"), None)
        self._host_sums: dict[Tensor, HostGradient] = {}  # of all offloaded parameters
        self._allocate(offloaded, likes)
        self._staging = Staging(pin=self._gpu is not None)
        # Squares for the norm are summed as gradients arrive, but only if the last step asked for the norm.
        self._squares_on_arrival, self._norm_was_read = True, False
        self.forward_overlap: object = None  # keeps the ForwardOverlap alive, as its hooks hold weak references
        self._found_inf: Mapping[Any, Tensor] = {}  # by device, the loss scaler's flags of this step
        self.is_unscaling = False  # whether GradScaler._unscale_grads_ is running

    def _sum_like(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        """A meta tensor with the shape and dtype of a gradient's sum: float32 if there are several micro-batches."""
        return torch.empty(local.shape, dtype=torch.float32 if self._micro_batches > 1 else dtype, device="meta")

    def _allocate(self, params: Iterable[Tensor], likes: Sequence[Tensor]) -> None:
        """Allocates host memory (pinned for GPUs) for the parameters' gradients, shaped like ``likes``."""
        homes = allocate_host_tensors(likes, pin=self._gpu, what="the gradients")
        for param, home in zip(params, homes, strict=True):
            self._host_sums[param] = HostGradient(self._progress[param].name, home, shard_of(param).holders_for_sums())

    @without_autograd
    def gradient_ready(self, param: Tensor) -> None:
        """Starts the copy of a complete gradient to the host; the optimizer's ``step()`` will step the parameter.

        Leaves the gradient in ``.grad`` if the parameter is not offloaded by ``offload="step"``.

        Raises:
            RuntimeError: the parameter got more gradients than micro-batches since the last ``step()``; or the forward
                pass did not wait for its last step; or the gradient is sharded otherwise than the parameter, and cannot
                be redistributed.
        """
        progress = self._progress[param]
        if progress.read_early or progress.pending is not None:
            raise RuntimeError(
                f"{progress.name} {tuple(param.shape)}: got a gradient of a value that may have been read before the "
                "last step was complete, expected the forward pass of the module that has it, within that of the "
                "model given to release_gradients(); call modules instead of reading their parameters, or leave "
                "overlap_forward out"
            )
        if any(self._found_inf.values()):  # GradScaler has skipped the step, so nobody has called next_step()
            self._discard_host_gradients()
        if not self._has_gradients:
            self._has_gradients = True
            patch_loss_scalers()  # now, as the loss has been scaled: the scaler's class is defined
        is_part, host = self._expects_more(param), self._host_sums.get(param)
        # A part stays in .grad, where FSDP2 adds the next one, unless the host has a sum of other micro-batches.
        if not is_part or (host is not None and host.count):
            self._copy_to_host(param, is_part=is_part)

    def _copy_to_host(self, param: Tensor, *, is_part: bool = False) -> None:
        """Starts the copy of an offloaded parameter's gradient to the host, and clears ``.grad``.

        Leaves sparse gradients and other dtypes in ``.grad``, for which ``step()`` will raise. With ``is_part`` more
        parts of this micro-batch's gradient follow, and the copy does not count as a gradient.
        """
        host, gradient = self._host_sums.get(param), param.grad
        if host is None or gradient is None or gradient.layout != torch.strided or gradient.dtype not in DTYPES:
            return
        with naming_errors(self._progress[param].name):
            local = shard_of(param).local_gradient(gradient)
        if host.count == self._micro_batches:
            raise self._too_many_gradients(param)
        host = self._fitting_sum(param, local)
        is_first = host.count == 0
        if is_first:
            host.is_incomplete = False
        if not is_part:
            host.count += 1
        squares = zero_share() if self._squares_on_arrival and host.count == self._micro_batches else None
        source = local.resolve_neg().contiguous()
        # Must not hold a reference to the release: it may be garbage-collected while this task is queued.
        add = partial(host.add, source, self._staging, is_first=is_first, squares=squares)
        stream_index = -1  # any number, but always the same one: each task waits for its own copies
        task = self._worker.submit(param.device, stream_index, add, (source, gradient), keeps_gradient=True)
        host.copied = task.future
        param.grad = None

    def _fitting_sum(self, param: Tensor, gradient: Tensor) -> HostGradient:
        """A parameter's sum on the host; allocates another if shape or dtype were changed, as by ``model.to()``."""
        host, like = self._host_sums[param], self._sum_like(gradient, gradient.dtype)
        if (host.sum.shape, host.sum.dtype) == (like.shape, like.dtype):
            return host
        if host.count:
            raise RuntimeError(
                f"got a gradient of {gradient.dtype} {tuple(gradient.shape)} after {host.sum.dtype} "
                f"{tuple(host.sum.shape)}; call optimizer.zero_grad(), and change the model between steps only"
            )
        self.wait()
        self._allocate([param], [like])
        return self._host_sums[param]

    def wait_for_steps(self, params: Iterable[Tensor]) -> None:
        """Waits for these parameters' steps, so that a forward pass may read them; raises the steps' exceptions."""
        for param in params:
            progress = self._progress.get(param)
            if progress is None:  # not released
                continue
            progress.read_early = False  # what is read from here on is the new value
            if (step := progress.pending) is not None:
                step.wait()
                progress.pending = None
                step.future.result()

    def end_forward(self) -> None:
        """Waits for all steps. In training, marks parameters whose steps no hook waited for as maybe read too early."""
        not_waited_for = [progress for progress in self._progress.values() if progress.pending is not None]
        self.wait()
        if torch.is_grad_enabled():
            for progress in not_waited_for:
                progress.read_early = True

    @without_autograd
    def collect_grads(self) -> None:
        """Adds ``.grad`` to gradients on the host and clears it; RuntimeError if that is one gradient too many."""
        for param in self.host_gradients:
            if param.grad is not None:  # set by hand, or accumulated while no hook was called
                self._copy_to_host(param)

    def norm_shares(self, *, largest: bool) -> Shares:
        """Waits for the gradients on the host; returns this rank's part of their norm, by the ranks to reduce it over.

        The part is an exact sum of squares, known already if the last step asked for one, too: then squares are summed
        as gradients arrive. With ``largest`` it is the largest magnitude instead, for which gradients are read now.
        """
        self.wait()
        # Sets of ranks without any gradient have a share of zero, as all ranks must all-reduce the same sets.
        shares: dict[HoldersForSums | None, list[Tensor]] = {
            x.holders: [zero_share()] for x in self._host_sums.values()
        }
        for host in self.host_gradients.values():
            host.check_complete()
            shares[host.holders].append(host.norm_share(largest=largest))
        if largest:
            # A magnitude is one word, the first.
            return {holders: torch.stack(words).amax(0)[:1] for holders, words in shares.items()}
        self._norm_was_read = True
        return {holders: torch.stack(words).sum(0) for holders, words in shares.items()}

    @property
    def host_gradients(self) -> Mapping[Tensor, HostGradient]:
        """The gradients of this step that are on the host, or being copied there, by their parameters."""
        return {param: host for param, host in self._host_sums.items() if host.count}

    @without_autograd
    def unscale(self, factor: Tensor, found: dict[Any, Tensor], found_inf: Tensor, *, allow_fp16: bool) -> None:
        """Unscales gradients on the host, as GradScaler does those in ``.grad``, and looks for inf and NaN. Collective.

        Args:
            factor: the inverse loss scale, one element.
            found: GradScaler's flags by device, set to 1 here if a gradient on the host is not finite on any rank.
            found_inf: GradScaler's initial flag, from which new flags are made.
            allow_fp16: whether float16 gradients may be multiplied, and so rounded again; otherwise ValueError.
        """
        if not allow_fp16 and any(host.sum.dtype == torch.float16 for host in self.host_gradients.values()):
            raise ValueError(
                "got float16 gradients in GradScaler.unscale_, expected gradients that are not rounded once more; use "
                "float32 parameters and torch.autocast, or leave unscale_ out: scaler.step(optimizer) unscales exactly"
            )
        shares = {holders: [words] for holders, words in self.norm_shares(largest=False).items()}
        holders_of_all = (shard_of(param).holders_for_sums() for param in self._progress)
        total = OverAll(holders_of_all).total(shares, zero_share(), largest=False)
        is_finite = math.isfinite(_C.sum_value(total.numpy()))
        for device in {param.device for param in self._progress}:
            flag = torch.full_like(found_inf, not is_finite, device=device)
            found[device] = torch.maximum(found.get(device, flag), flag)
        if float(factor) != 1.0:
            for host in self.host_gradients.values():
                host.sum.mul_(float(factor))
                host.squares = None
        self._found_inf = found

    def begin_replica(self, replica: Any, args: Any) -> None:
        """DDP's forward pre-hook: waits until copies to the host have read its buckets, which a pass overwrites."""
        wait([host.copied for host in self._host_sums.values() if host.copied is not None])

    def prepare_steps(self, scaling: LossScaling) -> Callable[[], None]:
        """Prepares the steps of all parameters whose gradients are on the host.

        Returns:
            A function that starts them: in the worker thread, or at once in this thread if a step needs collectives.

        Raises:
            RuntimeError, ValueError: see :meth:`Stepper.prepare`. Nothing was changed.
        """
        self.collect_grads()
        steps: dict[Tensor, Callable[[], None]] = {}
        gradients = self.host_gradients
        if gradients:  # read the scalars from the device once, not per parameter
            scaling = LossScaling(*(None if scalar is None else scalar.cpu() for scalar in scaling))
        for param, host in gradients.items():
            if host.is_incomplete:
                self.wait()  # raises the copy's exception, unless an earlier call has raised it
                host.check_complete()
            steps[param] = self._prepare(param, scaling, host.sum)

        def start() -> None:
            """Starts the prepared steps, and counts their gradients as used."""
            for param, step in steps.items():
                host = self._host_sums[param]
                if self._progress[param].stepper.communicates:
                    self.wait()  # until the copy of its gradient is done
                    step()
                else:
                    self._submit_step(param, partial(host.step, step), keeps_gradient=False)
                host.count = 0

        return start

    def next_step(self) -> None:
        """Starts a new step: discards gradients on the host, and notes whether the last step read the norm."""
        if self._has_gradients:  # not at zero_grad() after step(), which begins the same step again
            self._squares_on_arrival, self._norm_was_read = self._norm_was_read, False
        super().next_step()
        self._discard_host_gradients()

    def _discard_host_gradients(self) -> None:
        """Makes the next gradients overwrite those on the host, whose memory stays allocated."""
        self._found_inf = {}
        for host in self._host_sums.values():
            host.count = 0

    def end(self) -> None:
        """Waits for steps in flight, and warns if gradients on the host are lost, as step() has not used them."""
        super().end()
        if lost := len(self.host_gradients):
            text = f"remove() throws away the gradients of {lost} parameters; call optimizer.step() before"
            warn_user(text, RuntimeWarning)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are allocated for gradients and for staging their copies."""
        return sum(host.sum.nbytes for host in self._host_sums.values()) + self._staging.nbytes
