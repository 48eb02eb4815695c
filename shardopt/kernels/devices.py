"""The kernels of each kind of device."""

from __future__ import annotations

import torch

from shardopt.kernels.dispatch import Call, CpuCall, Tables
from shardopt.kernels.dispatch_cuda import CudaCall


def make_call(device: torch.device, tables: Tables) -> Call:
    """The call of the kernels of a device that :func:`shardopt.kernels.dispatch.check_device` lets pass."""
    return CpuCall(tables) if device.type == "cpu" else CudaCall(device, tables)
