"""Gradient clipping by the global norm, with bitwise equal results for any number of ranks and any sharding."""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardopt.kernels.autograd import without_autograd
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.internals import releases
from shardopt.step.gradient_norm import GradientNorm

#: Cached kernel tables of earlier calls, by the first parameter of the call.
_norms: MutableMapping[Tensor, GradientNorm] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]


@_disable_dynamo
@without_autograd
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
) -> Tensor:
    """Multiplies gradients so that their norm is at most ``max_norm``: ``torch.nn.utils.clip_grad_norm_``, exactly.

    The norm is the root of an exact sum of squares over the whole model, rounded once: it has the same bits however the
    parameters are sharded, on any number of ranks, threads and devices; torch's order of addition depends on them.
    Elements with copies on several ranks count once. Gradients are read once. Each mesh takes one all-reduce of 184
    bytes, which also carries the sums of meshes that are subsets of it. On CUDA the host does not wait for the device
    in a later call with the same parameters, except on a rank that has both plain parameters and parameters on a mesh
    of some of the job's ranks.

    All ranks that hold parts of the same parameters must call this, with the parameters in the same order.

    Args:
        parameters: the model's parameters, plain or as DDP, FSDP1, FSDP2, HSDP or tensor parallelism have them:
            float32, bfloat16 or float16, and so are their gradients.
        max_norm: gradients are multiplied by ``max_norm / (norm + 1e-6)`` where that is below 1.
        norm_type: 2, or ``inf`` for the largest magnitude.
        error_if_nonfinite: raise where the norm is NaN or infinite, which waits for the device. Otherwise an infinite
            gradient turns the others into 0, and NaN all into NaN, as in torch.
        foreach: accepted for torch's sake, without effect.
        optimizer: one or several optimizers of shardopt that have all of these parameters and no other ones with a
            gradient. Gradients then stay as they are, and the next ``step()`` multiplies by the coefficient as it reads
            them, unless they were replaced or changed meanwhile. Parameters and state get the bits that clipping
            float32 gradients in place would give; gradients in bfloat16 or float16 are not rounded once more. Clip
            right before ``step()``, after ``GradScaler.unscale_``. Released gradients need ``overlap_forward=True``.
            Do not use it with steps in a CUDA graph.

    Returns:
        The norm: float32, 0-d, on the first parameter's device. Infinite if an element is, NaN if one is.

    Raises:
        ValueError: another ``norm_type``, or ``optimizer`` has other parameters.
        TypeError: ``optimizer`` is not one of shardopt's, or ``parameters`` is a module.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is True; a gradient is sparse or of another
            dtype; the shard of a parameter is unknown; ``optimizer`` steps parameters in the backward pass
            (:func:`shardopt.release_gradients`); or it holds gradients in the host's memory and is not given. Gradients
            are unchanged.
    """
    if isinstance(parameters, Module):
        raise TypeError(f"got the module {type(parameters).__name__}, expected parameters; pass model.parameters()")
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if float(norm_type) not in (2.0, math.inf):
        raise ValueError(
            f"norm_type: got {norm_type}, expected 2 or inf, whose results do not depend on the order of the elements; "
            "use torch.nn.utils.clip_grad_norm_ for others"
        )
    optimizers: list[Any] = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    for each in optimizers:
        if not isinstance(each, ShardedOptimizer):
            raise TypeError(
                f"optimizer: got {type(each).__name__}, expected an optimizer of shardopt, which multiplies gradients "
                "as it reads them; leave optimizer= out, and the gradients are multiplied in place"
            )
    held_releases = list(filter(None, (each._internals.held_release for each in optimizers)))
    _refuse_released(params, held_releases)
    for release in held_releases:
        release.collect_grads()  # copies to the host what is still in .grad
    if not params:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    norm = _norms.get(params[0])
    if norm is None or not norm.take_gradients(params):  # no tables, or they no longer fit the parameters
        norm = _norms[params[0]] = GradientNorm(params)
    try:
        if optimizers:
            on_host = {param for release in held_releases for param in release.host_gradients}
            _check_parameters(params, norm.with_gradient, optimizers, on_host)
        largest = math.isinf(norm_type)
        host_shares = [release.norm_shares(largest=largest) for release in held_releases]
        total, coefficient = norm.norm_and_coefficient(float(max_norm), largest=largest, host_shares=host_shares)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"got gradients whose norm of order {norm_type} is {float(total)}, expected a finite one; the "
                "option nonfinite='raise' names the parameter, or pass error_if_nonfinite=False"
            )
        if optimizers:
            for each in optimizers:
                each._internals.set_clip_coefficient(coefficient)
        elif total.is_cuda or float(coefficient) != 1.0:  # on CUDA, reading it would wait for the device
            norm.scale_gradients(coefficient)
    finally:
        norm.forget_gradients()  # else the cache would keep them alive
    return total


def _refuse_released(params: Sequence[Tensor], given: Sequence[Any]) -> None:
    """Raises RuntimeError if parameters are stepped in the backward pass, or by a release missing in ``given``."""
    for release in tuple(releases):
        if not release.overlaps_forward and any(param in release.params for param in params):
            raise RuntimeError(
                "got parameters whose gradients are released, expected all gradients at once: parameters are stepped "
                "during the backward pass, before the norm is known; release them with overlap_forward=True, which "
                "steps parameters during the next forward pass, or train without clipping by the norm"
            )
        held = release.host_gradients if release.overlaps_forward and release not in given else ()
        if count := sum(param in held for param in params):
            raise RuntimeError(
                f"got {count} parameters whose gradients are held in the host's memory (release_gradients with "
                "overlap_forward), expected their optimizer, which multiplies them as it reads them; call "
                "clip_grad_norm_(..., optimizer=optimizer)"
            )


def _check_parameters(
    params: list[Tensor], with_gradient: list[Tensor], optimizers: Iterable[ShardedOptimizer], on_host: set[Tensor]
) -> None:
    """Raises ValueError unless the parameters with gradients among ``params`` and in the optimizers are the same.

    ``with_gradient`` are those of ``params`` with a ``.grad``; a release keeps the gradients of ``on_host`` in host
    memory.
    """
    stepped = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    if len(stepped) == len(params) and all(map(is_, stepped, params)):  # as usual; sets would take longer
        return
    given, known = set(map(id, params)), set(map(id, stepped))
    missing = sum(id(param) not in known for param in with_gradient)
    more = sum(id(param) not in given and (param.grad is not None or param in on_host) for param in stepped)
    if missing or more:
        raise ValueError(
            f"optimizer: got {missing} parameters with a gradient that it does not have, and {more} of its own that "
            "are not among those given, expected the same ones; give all of both, or leave optimizer= out"
        )
