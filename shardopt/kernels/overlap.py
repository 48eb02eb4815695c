"""Finds tensors that share memory: if a step changed both, its result would depend on threads."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
from torch import Tensor


def sharing_memory(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """The indices, ascending, of two strided tensors that have a byte in common; None if no two have."""
    begins = np.array([tensor.data_ptr() for tensor in tensors], np.int64)  # 0 without elements
    ends = begins + np.array([_span(tensor) for tensor in tensors], np.int64)
    order = np.argsort(begins, kind="stable")
    if not np.any(begins[order][1:] < np.maximum.accumulate(ends[order])[:-1]):
        return None
    reaching: list[int] = []  # tensors that begin before this one and may end after its beginning
    for index in order.tolist():
        reaching = [other for other in reaching if ends[other] > begins[index]]
        for other in reaching:  # views of one tensor may be interleaved, and share nothing
            if np.shares_memory(_memory(tensors[other]), _memory(tensors[index])):
                return min(other, index), max(other, index)
        if tensors[index].numel():
            reaching.append(index)
    return None


def _span(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.numel() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _memory(tensor: Tensor) -> npt.NDArray[np.void]:
    """An array at the tensor's place, on any device: its elements must not be read."""
    interface = {
        "version": 3,
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
        "typestr": f"|V{tensor.itemsize}",
        "data": (tensor.data_ptr(), False),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
