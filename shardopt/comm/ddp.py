"""Ordered sums under DistributedDataParallel: a communication hook."""

from __future__ import annotations

import weakref
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shardopt.comm.progress import Progress
from shardopt.comm.reduction import Reduction
from shardopt.comm.wire import Wire, WireFormat, rows_of
from shardopt.kernels.autograd import without_autograd

#: all_gather_into_tensor, whose name warns since PyTorch 2.13.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class DdpReducer:
    """Sums of the gradients of a DistributedDataParallel: each rank owns some rows of each parameter."""

    def __init__(self, replica: DistributedDataParallel, progress: Progress, wire: WireFormat) -> None:
        self._replica, self._progress, self._format = replica, progress, wire
        self._group = replica.process_group
        self._of: dict[Tensor, tuple[Reduction, list[int], slice]] = {}  # sums, parameters' ids, rows in their chunks
        self._means: dict[Tensor, Tensor] = {}  # of parameters, in their buckets
        # Hooks that PyTorch's reducer reaches would keep the module alive for good if they held this. The module does.
        this = weakref.ref(self)
        for param in replica.parameters():
            if param.requires_grad:
                param.register_hook(lambda _: this()._begin())  # type: ignore
        replica.register_comm_hook(this, lambda this, bucket: this().reduce(bucket))  # type: ignore
        progress.at_end.append(self._end)

    def _begin(self) -> None:
        if not self._replica.require_backward_grad_sync:
            raise RuntimeError(
                "got a backward pass within no_sync() with ordered_gradients, expected a pass outside of no_sync(), "
                "which adds gradients before they are sent; leave no_sync() out, sums wait on their owners"
            )
        self._progress.begin()

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if not buffer.is_cuda:
            self._sum(bucket)
            done: Future[Tensor] = Future()
            done.set_result(buffer)
            return done
        done = Future(devices=[buffer.device])
        stream = _side_stream(buffer.device)
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            self._sum(bucket)
            done.set_result(buffer)  # whoever waits for it also waits for what is in this stream by now
        return done

    @without_autograd
    def _sum(self, bucket: GradBucket) -> None:
        grads = {p: g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True) if p.numel()}
        if not grads:
            return
        reduction = self._reduction_of(list(grads))
        size = self._group.size()
        chunks = torch._chunk_cat([g if g.dim() else g.view(1) for g in grads.values()], dim=0, num_chunks=size)
        chunk = chunks[self._group.rank()]
        reduction.push(chunks, chunk)
        if not self._progress.is_last:
            bucket.buffer().zero_()
            return
        total = chunk.new_empty(size * reduction.wire.numel)
        _all_gather(total, chunk, group=self._group)
        total = total.view(size, -1)
        for param, grad in grads.items():
            rows = total[:, self._of[param][2]].reshape(-1)
            grad.copy_(rows[: grad.numel()].view_as(grad))
            if self._replica.find_unused_parameters:
                self._means[param] = grad

    def _reduction_of(self, params: list[Tensor]) -> Reduction:
        """The sums of a bucket, which take over the earlier sums where DDP has formed other buckets."""
        bucket, (known, of_known, _) = list(map(id, params)), self._of.get(params[0], (None, [], None))
        if known is not None and of_known == bucket:
            return known
        wholes = [rows_of(param.shape) for param in params]
        parts = [(-(-rows // self._group.size()), row_numel) for rows, row_numel in wholes]
        sums = Reduction(self._progress, Wire(self._format, parts), self._group)
        if self._progress.first:
            sums.counter.join([(earlier.counter, rows) for earlier, _, rows in (self._of[param] for param in params)])
        start = 0
        for param, (rows, row_numel) in zip(params, parts, strict=True):
            self._of[param] = sums, bucket, slice(start, start := start + rows * row_numel)
        return sums

    @without_autograd
    def _end(self) -> None:
        """DDP leaves gradients alone that no rank used in the last pass; they have sums of others."""
        is_behind = not self._of or any(self._progress.is_behind(sums.counter) for sums, _, _ in self._of.values())
        if is_behind and self._progress.has_changed(self._replica.parameters()):
            raise RuntimeError(
                "got a backward pass that DistributedDataParallel does not reduce, expected a pass that it reduces; "
                "call DistributedDataParallel, not its module, outside of no_sync()"
            )
        if self._progress.is_last:
            for param, mean in self._means.items():
                if param.grad is not None:
                    param.grad.copy_(mean)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
