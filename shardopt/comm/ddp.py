"""Ordered gradient sums under DDP and in one process: at the end of each backward pass ``param.grad`` is added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket, _compute_bucket_assignment_by_size
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from shardopt.comm.progress import Progress
from shardopt.comm.reduction import Reduction
from shardopt.comm.wire import WireFormat
from shardopt.kernels.autograd import without_autograd
from shardopt.release.backward import Hook
from shardopt.release.ddp_buckets import check_options, parameters_in_buckets, register_hook

#: Gradients of several parameters are combined into messages of about this many bytes.
_MESSAGE_BYTES = 1 << 25


class GradientReducer:
    """Reduces gradients to ordered sums, of which each rank owns some rows of every parameter.

    ``messages`` has a list of parameters per message, whose gradients are exchanged together; ``mesh`` is a list of the
    process group of all ranks, empty for one process.
    """

    def __init__(
        self, messages: Sequence[Sequence[Tensor]], progress: Progress, wire: WireFormat, mesh: Sequence[ProcessGroup]
    ) -> None:
        self._progress, self._mesh = progress, mesh
        self._messages = [(params, Reduction(progress, wire, (x.shape for x in params), mesh)) for params in messages]
        progress.end_callbacks.append(self._end_pass)

    @without_autograd
    def _end_pass(self) -> None:
        """Adds ``.grad`` to the sums, and sets it to zeros, or in the step's last pass to the all-gathered mean."""
        for params, reduction in self._messages:
            if all(param.grad is None for param in params):  # on all ranks, as DDP gives them all a gradient or none
                continue
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
            # A row per rank: its rows of each gradient, padded to equal numbers.
            chunks = torch._chunk_cat([x if x.dim() else x.view(1) for x in grads], dim=0, num_chunks=reduction.size)
            reduction.reduce_scatter(chunks, chunks[reduction.rank])
            if not self._progress.is_last:
                torch._foreach_zero_(grads)
                continue
            if reduction.size > 1:
                dist.all_gather(list(chunks), chunks[reduction.rank].clone(), group=self._mesh[0])
            for grad, columns in zip(grads, reduction.wire.slices, strict=True):
                grad.copy_(chunks[:, columns].reshape(-1)[: grad.numel()].view_as(grad))


class PlainReducer(GradientReducer):
    """Ordered sums of the gradients of a module that is trained in one process, without DDP or FSDP2."""

    def __init__(self, model: Module, progress: Progress, wire: WireFormat) -> None:
        params = [x for x in model.parameters() if x.numel() and (x.is_floating_point() or x.is_complex())]
        super().__init__([[param] for param in params], progress, wire, ())
        for param in params:
            is_trained = param.requires_grad
            param.requires_grad_(True)  # a frozen parameter may be trained later, and PyTorch refuses its hook now
            param.register_hook(progress.begin_pass)  # type: ignore[no-untyped-call]
            param.requires_grad_(is_trained)


class DdpReducer(GradientReducer):
    """Ordered sums of the gradients of a DDP module. Parameters that no rank has used keep the gradient None."""

    def __init__(self, replica: DistributedDataParallel, progress: Progress, wire: WireFormat) -> None:
        trained = [param for param in parameters_in_buckets(replica) if param.requires_grad]
        params = [param for param in trained if param.numel()]
        index_lists, _ = _compute_bucket_assignment_by_size(params, [_MESSAGE_BYTES])
        messages = [[params[index] for index in indices] for indices in index_lists]
        super().__init__(messages, progress, wire, [replica.process_group])
        self._reduced_buckets: list[int] = []  # indices of buckets that DDP has asked to reduce in this backward pass
        register_hook(replica, self._reduced_buckets, _skip_all_reduce)
        replica.register_forward_pre_hook(check_options)
        # Forgets the buckets of a pass that raised. This hook also keeps self alive: a reference from a parameter's
        # hook would be a cycle that is never collected.
        replica.register_forward_pre_hook(lambda *_: self._reduced_buckets.clear())
        for param in trained:  # parameters without elements, too: DDP may reduce their bucket first
            param.register_hook(Hook(progress.begin_pass))  # type: ignore[no-untyped-call]

    def _end_pass(self) -> None:
        """As the base class; raises RuntimeError if DDP has reduced no bucket in this pass, as in ``no_sync()``."""
        if not self._reduced_buckets:
            raise RuntimeError(
                "got a backward pass that DistributedDataParallel does not reduce, expected a pass that it reduces; "
                "call DistributedDataParallel, not its module, outside of no_sync()"
            )
        self._reduced_buckets.clear()
        super()._end_pass()


def _skip_all_reduce(buckets: list[int], bucket: GradBucket) -> Future[Tensor]:
    """A DDP hook that notes the bucket and reduces nothing. DDP still finds out which parameters any rank has used."""
    buckets.append(bucket.index())
    buffer = bucket.buffer()
    done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done
