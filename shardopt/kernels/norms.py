"""Launches the gradient clipping kernels of csrc/norm: exact sums of squares, largest magnitude, scaling in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import DTYPES, KernelRows, cpu_target
from shardopt.kernels.dispatch_cuda import pin_packed, use_in_current_stream

#: Launches a norm kernel: (kind of pass, number of rows to process from the first on, coefficient for ``scale``).
#: Squares and magnitudes are accumulated at the rows' addresses ``sums``; ``scale`` changes gradients in place.
NormCall = Callable[..., None]


def _run_on_cpu(kernel_rows: KernelRows, norm_pass: _C.NormPass, rows: int, factor: Tensor | float = 1.0) -> None:
    """Runs a norm kernel over the first ``rows`` kernel rows: with the first argument bound, a :data:`NormCall`."""
    _C.norm(kernel_rows[:rows], norm_pass, float(factor), torch.get_num_threads(), cpu_target())


class CudaNormCall:
    """Launches the norm kernels on a CUDA device, asynchronously in the current stream.

    Args:
        device: the gradients' device.
        kernel_rows: table of gradients, in host memory; uploaded again when a gradient's address has changed.
    """

    def __init__(self, device: torch.device, kernel_rows: KernelRows) -> None:
        self._device, self._kernel_rows = device, kernel_rows
        counts = -(-kernel_rows["cols"] // _C.cuda_norm_task)
        self._task_counts = np.cumsum([0, *counts.tolist()])  # by the number of rows to process, from the first on
        row_of_task = np.repeat(np.arange(len(kernel_rows)), counts)
        first_element = (np.arange(len(row_of_task)) - self._task_counts[row_of_task]) * _C.cuda_norm_task
        tasks = np.stack([first_element, row_of_task], 1)
        self._tasks = pin_packed(tasks).to(device, non_blocking=True)
        self._uploaded_addresses: bytes | None = None  # the gradients' addresses in the uploaded table
        self._table: Tensor

    def run(self, norm_pass: _C.NormPass, rows: int, factor: Tensor | None = None) -> None:
        """Launches one kernel; see :data:`NormCall`.

        Raises:
            RuntimeError: a CUDA graph captures the pass.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "got clip_grad_norm_ captured into a CUDA graph, expected a call outside of graphs, as the host "
                "uploads its tables; call clip_grad_norm_ before the graph is replayed, without optimizer="
            )
        if factor is not None:
            factor = factor.to(self._device)
        addresses = self._kernel_rows["gradient"].tobytes()
        if addresses != self._uploaded_addresses:
            self._table = pin_packed(self._kernel_rows).to(self._device, non_blocking=True)
            self._uploaded_addresses = addresses
        use_in_current_stream(self._device, (self._tasks, self._table))
        _C.norm_cuda(
            self._table.data_ptr(), self._tasks.data_ptr(), int(self._task_counts[rows]), norm_pass,
            0 if factor is None else factor.data_ptr(), self._device.index or 0,
            torch.cuda.current_stream(self._device).cuda_stream,
        )  # fmt: skip


def make_norm_call(device: torch.device, kernel_rows: KernelRows) -> NormCall:
    """Creates the launcher of norm kernels for a device that :func:`shardopt.kernels.dispatch.check_device` accepts.

    ``kernel_rows`` are structs ``_C.kernel_row``, one per gradient; csrc/norm/norm.h names the fields that are used.
    """
    return partial(_run_on_cpu, kernel_rows) if device.type == "cpu" else CudaNormCall(device, kernel_rows).run


def accumulate_norm(values: Tensor, norm_pass: _C.NormPass, result: Tensor) -> None:
    """Accumulates the exact sum of squares, or the largest magnitude, of values in host memory into ``result``.

    Args:
        values: contiguous, of a dtype of :data:`shardopt.kernels.dispatch.DTYPES`.
        norm_pass: ``squares`` or ``largest``.
        result: updated in place; int64 on the CPU, (``_C.sum_words``,) for ``squares``, (1,) for ``largest``.
    """
    row = np.zeros(1, _C.kernel_row)
    row["gradient"], row["gradient_dtype"] = values.data_ptr(), DTYPES[values.dtype]
    row["cols"], row["sums"] = values.numel(), result.data_ptr()
    _run_on_cpu(row, norm_pass, 1)


def norm_and_coefficient(words: Tensor, max_norm: float, *, is_magnitude: bool) -> Tensor:
    """Computes the gradient norm, rounded once, and the clip coefficient of ``torch.nn.utils.clip_grad_norm_``.

    Args:
        words: int64: an exact sum of squares, (``_C.sum_words``,), or the bits of the largest magnitude, (1,).
        max_norm: the largest norm that the gradients may have.
        is_magnitude: whether the norm is the largest magnitude.

    Returns:
        Norm and coefficient: float32, (2,), on the device of the words.
    """
    clip = torch.empty(2, dtype=torch.float32, device=words.device)
    if words.device.type == "cpu":
        _C.clip(words.data_ptr(), is_magnitude, max_norm, clip.data_ptr())
    else:
        stream = torch.cuda.current_stream(words.device).cuda_stream
        _C.clip_cuda(words.data_ptr(), is_magnitude, max_norm, clip.data_ptr(), words.device.index or 0, stream)
    return clip
