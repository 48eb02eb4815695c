"""Gradient release under DistributedDataParallel: no gradients beside its buckets, steps at the end of backward passes.

DDP's buckets hold all gradients for good. Where ``gradient_as_bucket_view`` is not set, each gradient lies beside them,
too: a communication hook frees it as soon as its bucket is complete, if the parameter is contiguous.
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
    """The communication hook of a DDP module, which is registered if there is none.

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
    """The communication hook of one DDP module, for good: a hook without steps reduces as DDP does alone.

    Args:
        replica: the DDP module.
    """

    def __init__(self, replica: DistributedDataParallel) -> None:
        self._group, self._has_views = replica.process_group, replica.gradient_as_bucket_view
        self._steps: dict[Tensor, Step] = {}
        self._moved: set[Tensor] = set()  # whose gradient is its place in a bucket in this pass

    def add(self, param: Tensor, step: Step) -> Callable[[], object]:
        """Has a parameter stepped at the end of each backward pass that it is used in; returns how to end that."""
        self._steps[param] = step
        return lambda: self._steps.pop(param)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Begins to reduce a bucket."""
        if self._steps or self._moved:  # the release may end within a pass
            for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                # A bucket does not say how the gradient of a strided parameter lies in it: that one stays beside it.
                if param in self._steps and param.grad is not None and param.is_contiguous():
                    param.grad = gradient  # its place in the bucket, where it was copied to: frees the other one
                    self._moved.add(param)
            if bucket.is_last():  # in the backward pass that DDP ends in, which may be a reentrant checkpoint's
                # DDP waits for buckets, and finds out what was used on any rank, in a callback that it queues later.
                queue = Variable._execution_engine.queue_callback
                queue(partial(queue, self._step))
        # As DDP divides: by a multiplication, before the sum.
        buffer = bucket.buffer().mul_(1.0 / self._group.size())
        reducing = dist.all_reduce(buffer, group=self._group, async_op=True).get_future()
        reduced: Future[Tensor] = reducing.then(lambda future: future.value()[0])
        return reduced

    def _step(self) -> None:
        for param, step in self._steps.items():
            if param.grad is not None:
                step(param)
        for param in self._moved:
            if param.grad is not None and not self._has_views:
                param.grad = param.grad.clone()  # more micro-batches follow, and DDP needs it outside of its bucket
        self._moved.clear()
