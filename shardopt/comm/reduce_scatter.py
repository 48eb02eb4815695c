"""FSDP2's reduce-scatter in 8 bits: codes all to all, float32 sums in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shardopt.kernels.messages import decode_sum, encode


class ReduceScatter8bit:
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter`` that sends a byte per element (PyTorch >= 2.9).

    Each rank codes its gradients in E4M3 with a scale per 128 elements, sends every other rank its chunk in one
    message, and adds up what it got in float32, in the order of the ranks. The result has the same bits whenever it is
    repeated on this number of ranks. NaN and infinities arrive as NaN.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the reduction's input or output: from PyTorch's allocator, as without this object."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduces in the current stream.

        Args:
            output_tensor: this rank's chunk; float32, bfloat16 or float16.
            input_tensor: as many chunks of that size and dtype as there are ranks, in their order.
            group: the ranks.
            op: ``ReduceOp.SUM``, ``AVG`` or ``PREMUL_SUM``, whose factor multiplies the sum here.
            async_op: has to be False.

        Raises:
            ValueError: another operation, or ``async_op``.
            TypeError: gradients of another dtype.
        """
        if async_op:
            raise ValueError("got async_op=True, expected False: the reduction is part of the current stream")
        size, chunk_numel = group.size(), output_tensor.numel()
        factor = factor_of(op, size)
        if chunk_numel == 0:
            return
        if size == 1:
            output_tensor.copy_(input_tensor if factor == 1.0 else input_tensor * factor)
            return
        message = encode(input_tensor, size, chunk_numel)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=group)
        decode_sum(received, output_tensor, chunk_numel, terms=size, factor=factor)


def factor_of(op: Any, size: int) -> float:
    """The factor by which FSDP2's reduction multiplies the sum over the ranks.

    Args:
        op: the reduction.
        size: how many ranks there are.

    Raises:
        ValueError: another operation.
    """
    if op == ReduceOp.SUM:
        return 1.0
    if op == ReduceOp.AVG:
        return 1.0 / size
    if op == ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()
        return float(factor)
    raise ValueError(f"got the reduction {op}, expected SUM, AVG or PREMUL_SUM, which FSDP2 reduces gradients by")
