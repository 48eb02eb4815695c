"""Gradient release under DistributedDataParallel: parameters are stepped at the end of each backward pass.

DDP's buckets hold a copy of all gradients and are never freed. Without ``gradient_as_bucket_view``, ``.grad`` is a
second copy: a communication hook frees it as soon as its bucket is complete, if the parameter is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Step = Callable[[Tensor], None]


def reduced_parameters(replica: DistributedDataParallel) -> list[Tensor]:
    """The parameters whose gradients a DDP module reduces in buckets.

    Raises:
        RuntimeError: the DDP module reduces some gradients in another way.
    """
    if replica._use_python_reducer or replica._delay_all_reduce_params:
        option = (
            "compiled autograd's python reducer" if replica._use_python_reducer else "delay_all_reduce_named_params"
        )
        raise RuntimeError(
            f"got DistributedDataParallel with {option}, expected gradients that it reduces in buckets; leave it out"
        )
    return list(replica._module_parameters)


def bucket_hook(replica: DistributedDataParallel) -> BucketHook:
    """Returns the :class:`BucketHook` of a DDP module; registers a new one if the module has none.

    Raises:
        RuntimeError: the DDP module has another communication hook, and can have no second.
    """
    for _, state in replica._comm_hooks:
        if isinstance(state, BucketHook):
            return state
    hook = BucketHook(replica)
    try:
        if replica._comm_hooks:
            raise RuntimeError("a communication hook is registered")
        replica.register_comm_hook(hook, lambda hook, bucket: hook.reduce(bucket))
    except RuntimeError as error:
        raise RuntimeError(
            "got DistributedDataParallel with a communication hook (mixed_precision registers one, too), expected "
            "none: it can have no second; make it without"
        ) from error
    return hook


class BucketHook:
    """A DDP communication hook that all-reduces buckets, and steps parameters at the end of the backward pass.

    DDP cannot remove a hook: after the release has ended this one only all-reduces, as DDP itself would.
    """

    def __init__(self, replica: DistributedDataParallel) -> None:
        self._group, self._has_views = replica.process_group, replica.gradient_as_bucket_view
        self._steps: dict[Tensor, Step] = {}
        self._moved: set[Tensor] = set()  # parameters whose .grad was made a view of the bucket in this backward pass

    def add(self, param: Tensor, step: Step) -> Callable[[], object]:
        """Has ``step(param)`` called at the end of each backward pass that gives a gradient; returns how to undo it."""
        self._steps[param] = step
        return lambda: self._steps.pop(param)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Starts the all-reduce of a bucket's mean; frees gradients beside it; queues the steps at the last bucket."""
        if self._steps or self._moved:  # the release may end within a pass
            for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                # A bucket does not tell the strides of a gradient in it: non-contiguous parameters keep their .grad.
                if param in self._steps and param.grad is not None and param.is_contiguous():
                    param.grad = gradient  # a view of the bucket, into which DDP copied .grad: frees the old .grad
                    self._moved.add(param)
            if bucket.is_last():  # in the backward pass that DDP ends in, which may be a reentrant checkpoint's
                # DDP queues a callback later that waits for the all-reduces: queued twice, the steps come after it.
                queue = Variable._execution_engine.queue_callback
                queue(partial(queue, self._step))
        # DDP, too, multiplies by the reciprocal before the all-reduce: the same bits.
        buffer = bucket.buffer().mul_(1.0 / self._group.size())
        reducing = dist.all_reduce(buffer, group=self._group, async_op=True).get_future()
        reduced: Future[Tensor] = reducing.then(lambda future: future.value()[0])
        return reduced

    def _step(self) -> None:  # at the end of the backward pass, when all buckets are reduced
        for param, step in self._steps.items():
            if param.grad is not None:
                step(param)
        for param in self._moved:
            if param.grad is not None and not self._has_views:
                param.grad = param.grad.clone()  # accumulated by later micro-batches; DDP expects no view of a bucket
        self._moved.clear()
