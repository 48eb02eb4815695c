"""Gradient release under DistributedDataParallel: parameters are stepped at the end of each backward pass.

DDP's buckets hold a copy of all gradients and are never freed. Without ``gradient_as_bucket_view``, ``.grad`` is a
second copy: a communication hook frees it as soon as its bucket is complete, if the parameter is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


def check_options(replica: DistributedDataParallel, *_: Any) -> None:
    """Raises RuntimeError if DDP does not reduce all gradients in buckets within each pass; a forward pre-hook, too."""
    excluded = {
        "compiled autograd's python reducer": replica._use_python_reducer,
        "delay_all_reduce_named_params": replica._delay_all_reduce_params,
        "join()": replica._join_config.enable,
        "require_manual_backward_finalization": getattr(replica, "require_manual_backward_finalization", False),
    }
    for option in (name for name, is_used in excluded.items() if is_used):
        raise RuntimeError(
            f"got DistributedDataParallel with {option}, expected gradients that all ranks reduce in buckets within "
            "each backward pass; leave it out"
        )


def parameters_in_buckets(replica: DistributedDataParallel) -> list[Tensor]:
    """The parameters whose gradients a DDP module reduces; raises RuntimeError as :func:`check_options` says."""
    check_options(replica)
    return list(replica._module_parameters)


def register_hook(replica: DistributedDataParallel, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
    """Registers a hook that DDP calls with ``state`` and each bucket of gradients; RuntimeError if DDP has one."""
    try:
        if replica._comm_hooks:
            raise RuntimeError("a communication hook is registered")
        # A lambda has no annotations: DDP refuses a hook whose annotation of the bucket is a string, as here.
        replica.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    except RuntimeError as error:
        raise RuntimeError(
            "got DistributedDataParallel with a communication hook (release_gradients, mixed_precision and "
            "ordered_gradients register one), expected one without a hook, as it can have only one; make it without"
        ) from error


def bucket_hook(replica: DistributedDataParallel) -> BucketHook:
    """Returns a DDP module's :class:`BucketHook`, shared by all releases; registers one if the module has none."""
    for _, state in replica._comm_hooks:
        if isinstance(state, BucketHook):
            return state
    hook = BucketHook(replica)
    register_hook(replica, hook, BucketHook.reduce)
    return hook


class BucketHook:
    """A DDP communication hook that all-reduces buckets, and steps parameters at the end of the backward pass.

    DDP cannot remove a hook: after the release has ended this one only all-reduces, as DDP itself would.
    """

    def __init__(self, replica: DistributedDataParallel) -> None:
        self._group, self._has_views = replica.process_group, replica.gradient_as_bucket_view
        self._is_batched = getattr(replica, "batched_grad_copy", False)  # PyTorch 2.15
        self._hooks: dict[Tensor, Callable[[Tensor], None]] = {}
        self._bucket_views: set[Tensor] = set()  # parameters whose .grad this backward pass made a view of a bucket

    def add(self, param: Tensor, gradient_ready: Callable[[Tensor], None]) -> Callable[[], object]:
        """Has passes that give ``param`` a gradient end by ``gradient_ready(param)``; returns a function to undo it."""
        self._hooks[param] = gradient_ready
        return lambda: self._hooks.pop(param)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """DDP's hook: starts the all-reduce of a bucket's mean. At the last bucket also queues :meth:`_end_pass`.

        Sets each ``.grad`` to a view of the bucket, into which DDP has copied it: this frees the old gradient.
        """
        if self._hooks or self._bucket_views:  # without hooks, but with views, if the release ended within this pass
            for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                # A bucket does not tell the strides of a gradient in it: non-contiguous parameters keep their .grad.
                if param in self._hooks and param.grad is not None and param.is_contiguous():
                    param.grad = gradient
                    self._bucket_views.add(param)
            if bucket.is_last():  # in the backward pass that DDP ends in, which may be a reentrant checkpoint's
                # DDP queues its callback, which waits for the all-reduces, after this hook. So ours, when it is called,
                # queues itself once more: then it runs after DDP's.
                queue = Variable._execution_engine.queue_callback
                queue(partial(queue, self._end_pass))
        # DDP, too, multiplies by the reciprocal, or divides a whole bucket, before the all-reduce: the same bits.
        size, buffer = self._group.size(), bucket.buffer()
        buffer = buffer.div_(size) if self._is_batched else buffer.mul_(1.0 / size)
        reducing = dist.all_reduce(buffer, group=self._group, async_op=True).get_future()
        reduced: Future[Tensor] = reducing.then(lambda future: future.value()[0])
        return reduced

    def _end_pass(self) -> None:
        """Calls the parameters' functions when all buckets are reduced, at the end of the backward pass."""
        for param, gradient_ready in self._hooks.items():
            if param.grad is not None:
                gradient_ready(param)
        for param in self._bucket_views:
            if param.grad is not None and param.grad._is_view() and not self._has_views:  # kept for more micro-batches
                param.grad = param.grad.clone()  # without gradient_as_bucket_view DDP expects no view of a bucket
        self._bucket_views.clear()
