"""Ordered sums under DistributedDataParallel, and in one process: taken from ``param.grad`` when a pass is over."""

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
from shardopt.release.ddp_buckets import reduced_parameters
from shardopt.release.released import Hook

#: Bytes of the gradients of several parameters that travel in one message.
_MESSAGE_BYTES = 1 << 25


class GradientReducer:
    """Sums of the gradients of some parameters: each rank owns some rows of each.

    Args:
        messages: the parameters, by the message in which their gradients travel.
        progress: tells when a pass is over.
        wire: the format of messages.
        mesh: the group of ranks; none for one process.
    """

    def __init__(
        self, messages: Sequence[Sequence[Tensor]], progress: Progress, wire: WireFormat, mesh: Sequence[ProcessGroup]
    ) -> None:
        self._progress, self._mesh = progress, mesh
        self._sums = [(params, Reduction(progress, wire, (x.shape for x in params), mesh)) for params in messages]
        progress.at_end.append(self._end)

    @without_autograd
    def _end(self) -> None:
        """Adds this micro-batch's gradients to their sums, and zeroes them; the last one's become the mean."""
        for params, sums in self._sums:
            if all(param.grad is None for param in params):
                continue
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
            chunks = torch._chunk_cat([x if x.dim() else x.view(1) for x in grads], dim=0, num_chunks=sums.size)
            sums.push(chunks, chunks[sums.rank])
            if not self._progress.is_last:
                torch._foreach_zero_(grads)
                continue
            if sums.size > 1:
                dist.all_gather(list(chunks), chunks[sums.rank].clone(), group=self._mesh[0])
            for grad, place in zip(grads, sums.wire.places, strict=True):
                grad.copy_(chunks[:, place].reshape(-1)[: grad.numel()].view_as(grad))


class PlainReducer(GradientReducer):
    """Sums of the gradients of a module in one process."""

    def __init__(self, model: Module, progress: Progress, wire: WireFormat) -> None:
        params = [x for x in model.parameters() if x.numel() and (x.is_floating_point() or x.is_complex())]
        super().__init__([[param] for param in params], progress, wire, ())
        for param in params:
            is_trained = param.requires_grad
            param.requires_grad_(True)  # PyTorch takes no hook of a frozen parameter, which may be trained later
            param.register_hook(progress.begin)  # type: ignore[no-untyped-call]
            param.requires_grad_(is_trained)


class DdpReducer(GradientReducer):
    """Sums of the gradients of a DistributedDataParallel. A parameter that no rank has used keeps the gradient None."""

    def __init__(self, replica: DistributedDataParallel, progress: Progress, wire: WireFormat) -> None:
        trained = [param for param in reduced_parameters(replica) if param.requires_grad]
        params = [param for param in trained if param.numel()]
        numbers, _ = _compute_bucket_assignment_by_size(params, [_MESSAGE_BYTES])
        super().__init__([[params[n] for n in each] for each in numbers], progress, wire, [replica.process_group])
        self._seen: list[int] = []  # the buckets that DDP has seen in this pass
        replica.register_comm_hook(self._seen, lambda seen, bucket: _leave(seen, bucket))
        # DDP's reducer, which reaches hooks of parameters, would keep this for good. So a hook of the module keeps it.
        replica.register_forward_pre_hook(lambda *_: self._seen.clear())
        for param in trained:  # DDP may reduce first those without elements
            param.register_hook(Hook(progress.begin))  # type: ignore[no-untyped-call]

    def _end(self) -> None:
        if not self._seen:
            raise RuntimeError(
                "got a backward pass that DistributedDataParallel does not reduce, expected a pass that it reduces; "
                "call DistributedDataParallel, not its module, outside of no_sync()"
            )
        self._seen.clear()
        super()._end()


def _leave(seen: list[int], bucket: GradBucket) -> Future[Tensor]:
    """A communication hook that leaves this rank's gradients as they are: DDP only finds out which any rank has."""
    seen.append(bucket.index())
    buffer = bucket.buffer()
    done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done
