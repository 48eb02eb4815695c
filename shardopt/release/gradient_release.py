"""Gradient release: each parameter is stepped during the backward pass, and its gradient freed.

A parameter's post-accumulate hook does it, which FSDP2 runs after its reduction. DDP reduces gradients only after that
hook: see :mod:`shardopt.release.ddp_buckets`.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from shardopt.kernels.autograd import without_autograd
from shardopt.layout import FlatBuffer, FlatShard, shard_of
from shardopt.optim import ShardedOptimizer
from shardopt.release.ddp_buckets import bucket_hook, reduced_parameters
from shardopt.release.deferred import MOST_WAITING
from shardopt.release.held import HeldParameters
from shardopt.release.released import Hook, ReleasedParameters
from shardopt.state.options import is_whole


class GradientRelease:
    """A release of gradients, made by :func:`release_gradients`; ends by :meth:`remove`, or as a context manager.

    Args:
        undo: ends it when it is closed.
    """

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Ends the release: from the next backward pass on gradients are kept, and ``optimizer.step()`` is the step.

        Gradients that are held in the host's memory are thrown away, with a warning: call ``optimizer.step()`` before.
        """
        self._undo.close()

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@without_autograd
def release_gradients(
    model: Module,
    optimizer: ShardedOptimizer,
    *,
    overlap_forward: bool = False,
    waiting_gradients: int = MOST_WAITING,
    micro_batches: int = 1,
) -> GradientRelease:
    """Steps each parameter as soon as its gradient is complete, during the backward pass, and frees the gradient.

    So few gradients live at once: one parameter's; one unit's with FSDP2 (HSDP holds what it has all-reduced until the
    pass ends). DDP keeps its buckets, which hold all gradients: with it parameters are stepped at the end of the
    backward pass, and what is saved is the gradients beside the buckets, if they are contiguous.
    Parameters and state are those of ordinary steps, bit for bit, and the loop stays as it is::

        shardopt.release_gradients(model, optimizer)
        for batch in batches:
            model(batch).mean().backward()  # takes the step
            optimizer.step()  # ends it; steps what the backward pass has not: parameters that are not the model's
            schedule.step()
            optimizer.zero_grad()  # finds nothing

    With ``offload="step"`` the CPU takes the steps in a thread of its own, beside the backward pass, and
    ``optimizer.step()`` waits for the last ones.

    With ``overlap_forward`` nothing is stepped in the backward pass, so that gradients may be clipped by their norm, or
    thrown away. With ``offload="step"`` each gradient goes to the host's memory as soon as it is complete, the CPU adds
    up those of several micro-batches there, in float32, and ``optimizer.step()`` has the steps taken in the other
    thread, without waiting. The next forward pass waits for the steps of the parameters that it reads: FSDP2 where it
    gathers them, the layers of other models (elements of ``ModuleList`` or ``Sequential``) and modules around them when
    they are called (a head by itself, if the last pass of training has called it). So do ``state_dict``,
    ``load_state_dict`` and :mod:`shardopt.checkpoint`::

        shardopt.release_gradients(model, optimizer, overlap_forward=True, waiting_gradients=8, micro_batches=2)
        for batches in steps:
            for batch in batches:  # two
                (model(batch).mean() / 2).backward()  # gradients go to the host
            shardopt.clip_grad_norm_(model.parameters(), 1.0, optimizer=optimizer)
            optimizer.step()  # the steps begin

    Whoever else reads, writes or replaces parameters after ``optimizer.step()`` (averages of weights, norms,
    ``param.data``, ``model.to()``, a deep copy, a weight used before its layer or head is called) has to call
    ``optimizer.synchronize()`` first; a backward pass through an early read raises, as far as it can be told.
    CUDA graphs and ``torch.compile(fullgraph=True)`` exclude ``overlap_forward``. Other compiled code waits, too: the
    first release sets ``torch._dynamo.config.skip_nnmodule_hook_guards`` to False, and drops code that was compiled
    before. Gradients of parameters that are not offloaded stay in ``param.grad`` until ``step()``, which steps these
    parameters at once.

    Call it after ``fully_shard``, ``parallelize_module`` or ``DistributedDataParallel``, with the wrapped model.
    Parameters of the model that the optimizer does not have are left alone.

    Several backward passes per step need ``micro_batches``. A parameter that got fewer gradients is stepped by
    ``optimizer.step()``; one more raises. Passes that are not reduced (``no_sync`` of DDP,
    ``set_requires_gradient_sync(False)`` of FSDP2) bring none.

    ``torch.nn.utils.clip_grad_norm_`` finds no gradient that was stepped or taken to the host: it returns 0 and *does
    nothing*, which cannot be noticed from here. Hooks on single gradients (``Tensor.register_hook``) work. Without
    ``overlap_forward`` gradient release excludes all clipping by the norm, closures, and a scaled loss:
    ``GradScaler.step`` raises. Always excluded are ``nonfinite="raise"``, whose promise that nothing was changed could
    not be kept, rules with sums over all parameters, FSDP1, ZeroRedundancyOptimizer, and models with
    :func:`shardopt.comm.ordered_gradients`.

    Every backward pass that reaches a parameter counts: detach what is not to be trained. After an exception in a
    backward pass those parameters are stepped whose gradients were complete. ``optimizer.zero_grad()`` discards
    such a pass, so that training can go on (``model.zero_grad()`` cannot be noticed): those parameters stay stepped,
    which it warns of; with ``overlap_forward`` none is. Loading a state dict or checkpoint of the optimizer does so as
    well. FSDP2 needs ``reset_iter_state()`` (PyTorch 2.13) after an exception; DDP cannot go on.

    Where FSDP2 gives a gradient in parts, one per use of a module, the parameter is stepped once all are there.
    Reentrant checkpoints give a part each, too, which count as gradients of several passes: a parameter that is used in
    two of them raises, as one gradient too many. ``use_reentrant=False`` gives whole gradients.

    The release ends with :meth:`GradientRelease.remove`, and when the optimizer is freed: keep a reference to it.

    Args:
        model: the wrapped model.
        optimizer: one of shardopt's; several may share a model.
        overlap_forward: whether gradients are held until ``optimizer.step()``, and with ``offload="step"`` the steps go
            on during the next forward pass.
        waiting_gradients: with ``offload="step"``, how many gradients may wait on the device for their steps, or with
            ``overlap_forward`` for their way to the host: at least 1. More of them hide more.
        micro_batches: how many gradients each parameter gets per ``optimizer.step()``. With ``overlap_forward`` and
            ``offload="step"`` more than 1 takes 4 bytes of the host's memory per element, else the gradient's dtype.

    Returns:
        The release, to remove. DDP keeps its communication hook, which from then on does what DDP does without one.

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
        if not is_whole(value) or value < 1:
            raise ValueError(f"{name}: got {value!r}, expected at least 1, a whole number")
    owned = {param for group in optimizer.param_groups for param in group["params"]}
    params: list[Tensor] = [param for param in model.parameters() if param in owned and param.requires_grad]
    _check(model, params)
    replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    reduced = {param: replica for replica in replicas for param in reduced_parameters(replica)}
    reducing = dict.fromkeys(reduced[param] for param in params if param in reduced)
    buckets = {replica: bucket_hook(replica) for replica in reducing}
    kind = HeldParameters if overlap_forward else ReleasedParameters
    released = kind(optimizer, model, params, waiting_gradients, micro_batches)
    optimizer._internals.begin_release(released)
    step, wait = Hook(released.step), Hook(released.wait)
    undo = ExitStack()
    undo.callback(optimizer._internals.end_release)
    for module in model.modules():
        undo.callback(module.register_state_dict_pre_hook(wait).remove)  # type: ignore[no-untyped-call]
        undo.callback(module.register_load_state_dict_pre_hook(wait).remove)  # type: ignore[no-untyped-call]
    for param in params:
        if param in reduced:
            undo.callback(buckets[reduced[param]].add(param, step))
        else:
            undo.callback(param.register_post_accumulate_grad_hook(step).remove)  # type: ignore[no-untyped-call]
    for replica in buckets:
        undo.callback(replica.register_forward_pre_hook(Hook(released.begin_replica)).remove)
    within = partial(_begin_within_replica, Hook(released.check_replica))
    undo.callback(model.register_forward_pre_hook(within).remove)
    if isinstance(released, HeldParameters):
        from shardopt.release.forward_overlap import ForwardOverlap  # it imports torch's compiler

        released.overlap = ForwardOverlap(model, released, undo)
    return GradientRelease(undo)


def _check(model: Module, params: list[Tensor]) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it no model is an FSDP1 one
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise RuntimeError(
            "got a model of FullyShardedDataParallel (FSDP1), which never tells when a parameter's gradient is "
            "complete, expected one of fully_shard (FSDP2); shard it with fully_shard"
        )
    progress = sys.modules.get("shardopt.comm.progress")  # without it no gradients are ordered
    if progress is not None and any(progress.progresses_of(params)):
        raise RuntimeError(
            "got a model with ordered_gradients, whose gradients are zeros before the last micro-batch, expected a "
            "model without; use one of the two"
        )
    if not params:
        raise ValueError(
            "got an optimizer that has no trained parameter of the model, expected its own; make the optimizer after "
            "wrapping the model, and pass the wrapped model"
        )
    pending = sum(param.grad is not None for param in params)
    if pending:
        raise RuntimeError(
            f"got {pending} parameters that have a gradient, expected parameters without gradients; call "
            "optimizer.step() if the gradients are to be used, and optimizer.zero_grad()"
        )
    if any(isinstance(shard_of(param), FlatShard | FlatBuffer) for param in params):
        raise RuntimeError(
            "got parameters of flat shards, whose owners must step them together, expected whole parameters or "
            "DTensors; use fully_shard (FSDP2)"
        )


def _begin_within_replica(check: Hook, model: Module, args: Any) -> None:
    """A forward pre-hook of the model, which must not run within a DDP that was not there, or not seen."""
    replica = DistributedDataParallel._active_ddp_module
    if replica is not None:  # compiled code does not see more of this
        check(replica)
