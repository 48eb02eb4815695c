"""Gradient release: each parameter is stepped during the backward pass, and its gradient freed.

A post-accumulate hook of the parameter takes the step; FSDP2 calls it after the reduce-scatter. DDP calls it before its
all-reduce, so a communication hook takes the steps there (ddp_buckets.py). With ``overlap_forward`` the hook only
copies the gradient to the host, and ``step()`` and the next forward pass do the rest (overlapped.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from shardopt.kernels.autograd import without_autograd
from shardopt.layout import FlatBuffer, FlatShard, shard_of
from shardopt.optim import ShardedOptimizer
from shardopt.release.backward import BackwardRelease, Hook
from shardopt.release.ddp_buckets import BucketHook, bucket_hook, check_options, parameters_in_buckets
from shardopt.release.overlapped import OverlappedRelease
from shardopt.state.options import is_int


class GradientRelease(AbstractContextManager["GradientRelease"]):
    """Handle returned by :func:`release_gradients`: :meth:`remove`, or leaving its context, ends the release."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo  # removes all hooks when it is closed

    def remove(self) -> None:
        """Ends the release: from the next backward pass on gradients are kept, and ``optimizer.step()`` is the step.

        Gradients that are held in the host's memory are thrown away, with a warning: call ``optimizer.step()`` before.
        """
        self._undo.close()

    def __exit__(self, *_: object) -> None:
        self.remove()


@without_autograd
def release_gradients(
    model: Module,
    optimizer: ShardedOptimizer,
    *,
    overlap_forward: bool = False,
    waiting_gradients: int = 4,
    micro_batches: int = 1,
) -> GradientRelease:
    """Steps each parameter as soon as its gradient is complete, during the backward pass, and frees the gradient.

    So few gradients are in memory at once: one parameter's, or with FSDP2 one unit's (with HSDP all-reduced gradients
    stay until the pass ends). DDP's buckets always hold all gradients: there parameters are stepped at the end of the
    backward pass, and only the second copies in ``.grad`` are saved, of contiguous parameters.
    Parameters and state have the same bits as after ordinary steps, and the training loop stays as it is::

        shardopt.release_gradients(model, optimizer)
        for batch in batches:
            model(batch).mean().backward()  # takes the step
            optimizer.step()  # waits for the steps; takes those of parameters that are not the model's
            schedule.step()
            optimizer.zero_grad()  # has nothing to do

    With ``offload="step"`` the CPU takes the steps in a worker thread while the backward pass goes on, and
    ``optimizer.step()`` waits for the last ones.

    With ``overlap_forward`` nothing is stepped in the backward pass, so that gradients may be clipped by their norm, or
    discarded. With ``offload="step"`` each gradient is copied to the host as soon as it is complete, where the CPU sums
    the gradients of several micro-batches in float32, and ``optimizer.step()`` hands the steps to the worker thread
    without waiting. The next forward pass waits for the steps of the parameters that it reads: FSDP2 before each
    all-gather, layers of other models (elements of ``ModuleList`` or ``Sequential``) and modules around them when
    called (an output layer waits itself, if the last training pass has called it). ``state_dict``, ``load_state_dict``
    and :mod:`shardopt.checkpoint` wait, too; docs/offload.md has an example. Gradients of parameters that are not
    offloaded stay in ``param.grad`` until ``step()``, which steps these parameters at once.

    Other code that reads, writes or replaces parameters after ``optimizer.step()`` (averages of weights, norms,
    ``param.data``, ``model.to()``, a deep copy, a weight used before its layer or head is called) must call
    ``optimizer.synchronize()`` first; a backward pass through a value read too early raises where it is detected.
    CUDA graphs and ``torch.compile(fullgraph=True)`` exclude ``overlap_forward``. Other compiled code waits, too: the
    first release sets ``torch._dynamo.config.skip_nnmodule_hook_guards`` to False, and drops code compiled before.

    Call it after ``fully_shard``, ``parallelize_module`` or ``DistributedDataParallel``, with the wrapped model.
    Parameters of the model that the optimizer does not have are left alone.

    Several backward passes per step need ``micro_batches``. A parameter that got fewer gradients is stepped by
    ``optimizer.step()``; a gradient more than that raises. Backward passes without a reduction (``no_sync`` of DDP,
    ``set_requires_gradient_sync(False)`` of FSDP2) are not counted.

    ``torch.nn.utils.clip_grad_norm_`` finds no gradient that was stepped or copied to the host, and *does nothing*.
    Without ``overlap_forward`` gradient release excludes all clipping by the norm, closures, and a scaled loss, after
    which ``optimizer.step()`` raises: it sees clipping (not of DTensors) by zeros that a small parameter has for a
    gradient until then. Always excluded are rules with sums over all parameters, ZeroRedundancyOptimizer, and the cases
    below that raise RuntimeError. Hooks on single gradients (``Tensor.register_hook``) work.

    Every backward pass that reaches a parameter counts: detach what is not to be trained. If a backward pass raises,
    ``optimizer.zero_grad()`` discards it, so that training can go on (``model.zero_grad()`` does not), and warns that
    parameters whose gradients were complete stay stepped. Loading a state dict or checkpoint discards it as well.
    docs/sharding.md has more on exceptions, and on gradients that come in parts.

    The release ends with :meth:`GradientRelease.remove`, and when the optimizer is freed: keep a reference to it.

    Args:
        model: the wrapped model.
        optimizer: one of shardopt's; several may share a model.
        overlap_forward: whether gradients are held until ``optimizer.step()``, and with ``offload="step"`` the steps go
            on during the next forward pass.
        waiting_gradients: with ``offload="step"``, how many gradients may wait on the device for their steps, or with
            ``overlap_forward`` for their copies to the host: at least 1. More take more memory and overlap more.
        micro_batches: how many gradients each parameter gets per ``optimizer.step()``. With ``overlap_forward`` and
            ``offload="step"`` more than 1 takes 4 bytes of the host's memory per element, else the gradient's dtype.

    Returns:
        A handle to end the release. DDP's communication hook stays, and then reduces as DDP does without a hook.

    Raises:
        TypeError: the optimizer is none of shardopt's.
        ValueError: the optimizer has no trained parameter of the model, or has ``nonfinite="raise"``; or
            ``waiting_gradients`` or ``micro_batches`` is no whole number or less than 1.
        MemoryError: the host has too little memory for the gradients and the state.
        RuntimeError: a parameter has a gradient already, the optimizer's gradients are released already, the model is
            wrapped by FSDP1, has flat parameters or ordered gradients, or DDP has a communication hook or an option
            that excludes buckets.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        kind = type(optimizer).__name__
        why = "; it steps only once all gradients are there: use fully_shard" if kind.startswith("Zero") else ""
        raise TypeError(f"got {kind}, expected an optimizer of shardopt such as shardopt.AdamW8bit{why}")
    for name, value in (("waiting_gradients", waiting_gradients), ("micro_batches", micro_batches)):
        if not is_int(value) or value < 1:
            raise ValueError(f"{name}: got {value!r}, expected at least 1, a whole number")
    owned = {param for group in optimizer.param_groups for param in group["params"]}
    params: list[Tensor] = [param for param in model.parameters() if param in owned and param.requires_grad]
    _check_model(model, params)
    replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    replica_of = {param: replica for replica in replicas for param in parameters_in_buckets(replica)}
    bucket_hooks = {param: bucket_hook(replica_of[param]) for param in params if param in replica_of}
    kind = OverlappedRelease if overlap_forward else BackwardRelease
    release = kind(optimizer, model, params, waiting_gradients, micro_batches)
    optimizer._internals.begin_release(release)
    undo = ExitStack()
    undo.callback(optimizer._internals.end_release)
    _register_hooks(release, model, bucket_hooks, undo)
    for replica in dict.fromkeys(replica_of[param] for param in bucket_hooks):
        undo.callback(replica.register_forward_pre_hook(check_options).remove)
        if isinstance(release, OverlappedRelease):
            undo.callback(replica.register_forward_pre_hook(Hook(release.begin_replica)).remove)
    return GradientRelease(undo)


def _register_hooks(
    release: BackwardRelease, model: Module, bucket_hooks: Mapping[Tensor, BucketHook], undo: ExitStack
) -> None:
    """Registers a release's hooks in the model, for DDP's parameters in ``bucket_hooks``; ``undo`` will remove them."""
    gradient_ready, wait = Hook(release.gradient_ready), Hook(release.wait)
    for module in model.modules():
        undo.callback(module.register_state_dict_pre_hook(wait).remove)  # type: ignore[no-untyped-call]
        undo.callback(module.register_load_state_dict_pre_hook(wait).remove)  # type: ignore[no-untyped-call]
    for param in release.params:
        if param in bucket_hooks:
            undo.callback(bucket_hooks[param].add(param, gradient_ready))
        else:
            handle = param.register_post_accumulate_grad_hook(gradient_ready)  # type: ignore[no-untyped-call]
            undo.callback(handle.remove)
    check = partial(_check_running_replica, Hook(release.check_replica))
    undo.callback(model.register_forward_pre_hook(check).remove)
    if isinstance(release, OverlappedRelease):
        from shardopt.release.forward_overlap import ForwardOverlap  # here, as it imports torch's compiler

        release.forward_overlap = ForwardOverlap(model, release, undo)


def _check_model(model: Module, params: list[Tensor]) -> None:
    """Raises if the model or its trained parameters, ``params``, exclude a release, or have gradients already."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if nobody has imported it, no model is an FSDP1 one
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise RuntimeError(
            "got a model of FSDP1, which never tells when a gradient is complete; shard it with fully_shard (FSDP2)"
        )
    progress = sys.modules.get("shardopt.comm.progress")  # if nobody has imported it, no gradients are ordered
    if progress is not None and any(progress.progresses_of(params)):
        raise RuntimeError("got a model with ordered_gradients, expected one without; use one of the two")
    if not params:
        raise ValueError(
            "got an optimizer that has no trained parameter of the model; make it of the wrapped model, and pass both"
        )
    if pending := sum(param.grad is not None for param in params):
        raise RuntimeError(
            f"got {pending} parameters that have a gradient, expected none; call optimizer.step() or zero_grad() before"
        )
    if any(isinstance(shard_of(param), FlatShard | FlatBuffer) for param in params):
        raise RuntimeError("got parameters of flat shards, whose owners step them together; use fully_shard (FSDP2)")


def _check_running_replica(check: Hook, model: Module, args: Any) -> None:
    """A forward pre-hook: raises if the model runs inside of a DDP module that release_gradients() was not given."""
    replica = DistributedDataParallel._active_ddp_module
    if replica is not None:  # tested here, not in the hook, which compiled code would leave the graph to call
        check(replica)
