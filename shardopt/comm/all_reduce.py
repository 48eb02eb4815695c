"""DistributedDataParallel's all-reduce in 8 bits: a reduce-scatter, and an all-gather of the means, coded again.

Annotations here are classes, not strings: DistributedDataParallel compares those of a communication hook.
"""

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.futures import Future

from shardopt.kernels.messages import BLOCK, decode_sum, encode

#: Its name since PyTorch 2.13, whose old name warns.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def all_reduce_8bit(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """A communication hook: ``model.register_comm_hook(None, shardopt.comm.all_reduce_8bit)``.

    Each rank adds up its part of the bucket in float32, in the order of the ranks, as ``ReduceScatter8bit`` does, and
    sends the mean to all ranks in E4M3. Every rank decodes the same bytes, its own too, so that all have the same bits.
    On CUDA it runs in a stream of its own, beside the backward pass.

    Args:
        process_group: the ranks; None for all of them.
        bucket: gradients in float32, bfloat16 or float16.

    Returns:
        A future of the bucket's buffer with the mean over the ranks.

    Raises:
        TypeError: gradients of another dtype.
    """
    group = process_group or dist.distributed_c10d._get_default_group()
    buffer = bucket.buffer()
    if not buffer.is_cuda:
        _mean(buffer, group)
        done: Future[Tensor] = Future()
        done.set_result(buffer)
        return done
    done = Future(devices=[buffer.device])
    stream = _side_stream(buffer.device)
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(stream):
        _mean(buffer, group)
        done.set_result(buffer)  # whoever waits for it also waits for what is in this stream by now
    return done


@torch.no_grad()
def _mean(buffer: Tensor, group: ProcessGroup) -> None:
    """Replaces a bucket's elements by their means over the ranks."""
    size, rank = group.size(), group.rank()
    if size == 1:
        return
    chunk_numel = -(-buffer.numel() // (size * BLOCK)) * BLOCK
    message = encode(buffer, size, chunk_numel)
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message, group=group)
    own_numel = min(max(buffer.numel() - rank * chunk_numel, 0), chunk_numel)
    mean = torch.empty(own_numel, dtype=torch.float32, device=buffer.device)
    decode_sum(received, mean, chunk_numel, terms=size, factor=1.0 / size)
    gathered = message  # of the same size, and sent by now
    _all_gather(gathered, encode(mean, 1, chunk_numel), group=group)
    decode_sum(gathered, buffer, chunk_numel)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
