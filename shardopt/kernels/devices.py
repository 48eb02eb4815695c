"""The kernels of each kind of device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardopt.kernels.dispatch import Call, CpuCall, Tables
from shardopt.kernels.dispatch_cuda import CudaCall
from shardopt.kernels.skipped import SkippedElements


def make_call(device: torch.device, tables: Tables, skipped: SkippedElements) -> Call:
    """The call of the kernels of a device that has passed :func:`shardopt.kernels.dispatch.check_device`."""
    return CpuCall(tables, skipped) if device.type == "cpu" else CudaCall(device, tables, skipped)


def use_in_current_stream(device: torch.device, tensors: Sequence[Tensor]) -> None:
    """Tells PyTorch that a step uses memory on its device, which may have been allocated in another stream.

    Otherwise PyTorch would give the memory to that stream again as soon as the tensors are gone. Memory used in a
    captured CUDA graph must be kept instead.

    Args:
        device: a CUDA device.
        tensors: on any device; those on this one count.
    """
    if tensors and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device)
        for tensor in tensors:
            if tensor.device == device:
                tensor.record_stream(stream)
