"""Copies of many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.memory import has_memory


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors on any device to others in host memory, past the CPU's caches.

    PyTorch's threads meet after each tensor, and wait for each other when other programs run. Threads of this copy meet
    once.

    Args:
        targets: on the CPU, contiguous; none may overlap another target or a source.
        sources: as many, with the targets' shapes and dtypes.
    """
    near: list[tuple[Tensor, Tensor]] = []
    far: list[tuple[Tensor, Tensor]] = []
    for pair in zip(targets, sources, strict=True):
        (near if _is_memory(pair[1]) else far).append(pair)
    _C.copy_ranges(
        np.array([target.data_ptr() for target, _ in near], np.uint64),
        np.array([source.data_ptr() for _, source in near], np.uint64),
        np.array([source.nbytes for _, source in near], np.int64),
        torch.get_num_threads(),
    )
    if far:
        torch._foreach_copy_([target for target, _ in far], [source for _, source in far])


def _is_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in host memory, unmodified and contiguous."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or not (tensor.is_cpu and tensor.is_contiguous()):
        return False
    return has_memory(tensor) and not (tensor.is_conj() or tensor.is_neg())
