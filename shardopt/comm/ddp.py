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
from shardopt.release.ddp_buckets import parameters_in_buckets

#: Gradients of several parameters are combined into messages of about this many bytes.
_MESSAGE_BYTES = 1 << 25


class GradientReducer:
    """Reduces gradients to ordered sums, of which each rank owns some rows of every parameter.

    Args:
        messages: a list of parameters per message: the gradients of a list are exchanged together.
        progress: calls this object at the end of each backward pass.
        wire: the number format of gradients in messages.
        mesh: a list of the process group of all ranks; empty for one process.
    """

    def __init__(
        self, messages: Sequence[Sequence[Tensor]], progress: Progress, wire: WireFormat, mesh: Sequence[ProcessGroup]
    ) -> None:
        self._progress, self._mesh = progress, mesh
        self._sums = [(params, Reduction(progress, wire, (x.shape for x in params), mesh)) for params in messages]
        progress.at_end.append(self._end)

    @without_autograd
    def _end(self) -> None:
        """Adds ``.grad`` to the sums, then sets it to zeros, or after the step's last pass to the all-gathered mean."""
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
    """Ordered sums of the gradients of a module that is trained in one process, without DDP or FSDP2."""

    def __init__(self, model: Module, progress: Progress, wire: WireFormat) -> None:
        params = [x for x in model.parameters() if x.numel() and (x.is_floating_point() or x.is_complex())]
        super().__init__([[param] for param in params], progress, wire, ())
        for param in params:
            is_trained = param.requires_grad
            param.requires_grad_(True)  # a frozen parameter may be trained later, and PyTorch refuses its hook now
            param.register_hook(progress.begin)  # type: ignore[no-untyped-call]
            param.requires_grad_(is_trained)


class DdpReducer(GradientReducer):
    """Ordered sums of the gradients of a DDP module. Parameters that no rank has used keep the gradient None."""

    def __init__(self, replica: DistributedDataParallel, progress: Progress, wire: WireFormat) -> None:
        trained = [param for param in parameters_in_buckets(replica) if param.requires_grad]
        params = [param for param in trained if param.numel()]
        numbers, _ = _compute_bucket_assignment_by_size(params, [_MESSAGE_BYTES])
        super().__init__([[params[n] for n in each] for each in numbers], progress, wire, [replica.process_group])
        self._seen: list[int] = []  # indices of the buckets whose reduction DDP has asked for in this backward pass
        replica.register_comm_hook(self._seen, lambda seen, bucket: _leave(seen, bucket))
        # This hook keeps self alive: a reference from a parameter's hook would be a cycle that is never collected.
        replica.register_forward_pre_hook(lambda *_: self._seen.clear())
        for param in trained:  # parameters without elements, too: DDP may reduce their bucket first
            param.register_hook(Hook(progress.begin))  # type: ignore[no-untyped-call]

    def _end(self) -> None:
        if not self._seen:  # DDP has reduced no bucket in this pass, as in no_sync()
            raise RuntimeError(
                "got a backward pass that DistributedDataParallel does not reduce, expected a pass that it reduces; "
                "call DistributedDataParallel, not its module, outside of no_sync()"
            )
        self._seen.clear()
        super()._end()


def _leave(seen: list[int], bucket: GradBucket) -> Future[Tensor]:
    """A DDP communication hook that does not reduce: DDP only finds out which parameters any rank has used."""
    seen.append(bucket.index())
    buffer = bucket.buffer()
    done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done
