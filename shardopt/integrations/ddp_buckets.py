"""Steps under DistributedDataParallel: by a communication hook, which reduces a bucket of gradients, then steps it.

A bucket is stepped when a later one is complete, or at the end: so reductions overlap with the backward pass as ever,
and all steps are taken by the thread of the backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
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
        RuntimeError: it reduces some in another way.
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
        RuntimeError: it has another one, and can have no second.
    """
    for _, state in replica._comm_hooks:
        if isinstance(state, BucketHook):
            return state
    hook = BucketHook(replica)
    try:
        if replica._comm_hooks:
            raise RuntimeError("a communication hook is registered")
        replica.register_comm_hook(hook, _reduce_and_step)
    except RuntimeError as error:
        raise RuntimeError(
            "got DistributedDataParallel with a communication hook (mixed_precision registers one, too), expected "
            "none: it can have no second; make it without"
        ) from error
    return hook


class BucketHook:
    """The communication hook of one DDP module. It cannot be unregistered: without steps it does what DDP does alone.

    Args:
        replica: the DDP module.
    """

    def __init__(self, replica: DistributedDataParallel) -> None:
        self._group = replica.process_group
        self._steps: dict[Tensor, Step] = {}
        self._backward = -1  # the backward pass that the following belong to
        self._reducing: deque[_Bucket] = deque()
        self._stepped: set[Tensor] = set()

    def add(self, param: Tensor, step: Step) -> Callable[[], object]:
        """Has a parameter stepped as soon as its gradient is reduced; returns how to end that."""
        self._steps[param] = step
        return lambda: self._steps.pop(param)

    def reduce_and_step(self, bucket: GradBucket) -> Future[Tensor]:
        """Begins to reduce a bucket, and steps those before that are done."""
        # As DDP divides: by a multiplication, before the sum.
        buffer = bucket.buffer().mul_(1.0 / self._group.size())
        reduced = dist.all_reduce(buffer, group=self._group, async_op=True).get_future()
        if self._steps:
            self._begin()
            while self._reducing and self._reducing[0].reduced.done():
                self._step(self._reducing.popleft())
            self._reducing.append(_Bucket(reduced, list(self._take(bucket))))
        result: Future[Tensor] = reduced.then(lambda future: future.value()[0])
        return result

    def _begin(self) -> None:
        """Notices a new backward pass; the last one may have ended in an exception."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self._reducing.clear()
            self._stepped.clear()
            Variable._execution_engine.queue_callback(self._end)

    def _take(self, bucket: GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters to step with their places in the bucket, where DDP has just copied their gradients to."""
        for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            # One without gradient is not used on this rank. Whether it is on others, DDP knows at the end.
            if param in self._steps and param.grad is not None:
                param.grad = gradient  # frees the other one
                yield param, gradient

    def _step(self, bucket: _Bucket) -> None:
        bucket.reduced.wait()  # with NCCL this makes the stream wait
        for param, gradient in bucket.gradients:
            self._stepped.add(param)
            self._steps[param](param)
            param.grad = gradient  # without one DDP would make a new one

    def _end(self) -> None:
        # In a callback that was queued in the meantime DDP waits for all buckets and finds out what is used anywhere.
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        for param, step in self._steps.items():
            if param.grad is not None and param not in self._stepped:
                step(param)
            param.grad = None
        self._reducing.clear()
        self._stepped.clear()


class _Bucket(NamedTuple):
    """A bucket that is being reduced: parameters to step, and their gradients in it."""

    reduced: Future[list[Tensor]]
    gradients: list[tuple[Tensor, Tensor]]


def _reduce_and_step(state: BucketHook, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with classes
    return state.reduce_and_step(bucket)
