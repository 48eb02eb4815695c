"""Launches the CUDA step kernels, whose tables are uploaded asynchronously to device memory when they change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import Call, CpuCall, LossScaling, Tables, addresses
from shardopt.kernels.skipped import SkippedElements

_ALIGNMENT = 16  # bytes


class CudaCall:
    """The :class:`Call` for tables of a CUDA device; each step's kernels run in the stream that is then current.

    Tables are uploaded through pinned memory, which PyTorch's allocator keeps until the copy is done. Gradients'
    addresses change from step to step: a few are passed as kernel arguments, more are uploaded apart from the tables.
    A captured CUDA graph uploads its tables in every replay, to an offset of their own, which uncaptured steps between
    replays do not overwrite. The object must live as long as the graph.

    Args:
        device: the device of the kernels, and of all memory that the tables point to.
        tables: the kernels' arguments.
        skipped: counts gradient elements that the kernels skip: NaN, Inf, or overflowing a moment.
    """

    def __init__(self, device: torch.device, tables: Tables, skipped: SkippedElements) -> None:
        _demand(not torch.cuda.is_current_stream_capturing())
        self._device = device
        self._tables = tables
        self._codec_tables = [None if t is None else _on(t, device) for t in tables.codec_tables]
        self._counter = skipped.counter(device)
        self._rules: bytes | None = None
        self._groups: bytes | None  # copy of the uploaded table; None: upload it again
        self._kernel_rows: bytes | None  # the same, with the gradients' addresses set to 0
        self._spare: Tensor | None  # pinned memory for a capture, which cannot allocate any
        self._captured: list[Tensor] = []  # pinned memory that CUDA graphs upload from
        self._captured_scaling: list[LossScaling] = []

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step; see :class:`shardopt.kernels.dispatch.Call`.

        Raises:
            RuntimeError: a CUDA graph captures the first step of these tables, or no step was taken since the last
                capture.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        self._scaling = LossScaling(*(None if t is None else t.to(self._device, non_blocking=True) for t in scaling))
        rules, packed = groups["rule"].tobytes(), groups.tobytes()
        if rules != self._rules:
            _demand(not capturing)
            self._make_tables(groups)
            self._rules = rules
        kernel_rows = self._kernel_rows
        if rows_changed or kernel_rows is None:
            self._gradients = self._tables.kernel_rows["gradient"].copy()
            without_gradients = self._tables.kernel_rows.copy()
            without_gradients["gradient"] = 0
            kernel_rows = without_gradients.tobytes()
        head = [groups, self._tables.kernel_rows, *([self._gradients] if self._uploads_gradients else [])]
        if capturing:
            self._upload_in_graph(head)
            return
        if self._spare is None:
            self._spare = _pinned(self._head_bytes)
        self._head = 0
        if kernel_rows != self._kernel_rows or self._groups is None:
            self._upload(0, *head)
        else:
            if packed != self._groups:
                self._upload(0, groups)
            if rows_changed and self._uploads_gradients:
                self._upload(self._gradients_at, self._gradients)
        self._groups, self._kernel_rows = packed, kernel_rows

    def run(self, phase: _C.Phase) -> None:
        """Runs one phase; see :class:`shardopt.kernels.dispatch.Call`."""
        scale, found_inf, coefficient = self._scaling
        stream = torch.cuda.current_stream(self._device)
        head = self._start + self._head
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            for tensor in (self._memory, self._counter):
                tensor.record_stream(stream)
        _C.step_cuda(
            groups=head,
            kernel_rows=head + self._rows_at,
            gradients=head + self._gradients_at if self._uploads_gradients else self._gradients.ctypes.data,
            grad_scale=0 if scale is None else scale.data_ptr(),
            factor=0 if coefficient is None else coefficient.data_ptr(),
            found_inf=0 if found_inf is None else found_inf.data_ptr(),
            phase=phase,
            stream=stream.cuda_stream,
            **self._fixed,
        )

    def _make_tables(self, groups: npt.NDArray[np.void]) -> None:
        """Allocates device memory for all tables, and uploads the constant tables.

        The memory begins with the tables that change, the head: groups, kernel rows, and gradients' addresses if these
        are no kernel arguments. A second head follows, for CUDA graphs; then the constant tables.
        """
        kernel_rows = self._tables.kernel_rows
        tasks, batches = _C.cuda_tasks(kernel_rows, groups)
        fixed = {
            "steps": self._tables.steps,
            "tables": addresses(self._codec_tables),
            "tasks": tasks,
            "prepared": np.zeros(len(kernel_rows) * _C.cuda_prepared_bytes, dtype=np.uint8),  # filled in by the kernels
        }
        self._rows_at = _aligned(groups.nbytes)
        self._gradients_at = self._rows_at + _aligned(kernel_rows.nbytes)
        self._uploads_gradients = max(len(kernel_rows), len(self._tables.steps)) > _C.cuda_launched_gradients
        self._head_bytes = self._gradients_at + (_aligned(8 * len(kernel_rows)) if self._uploads_gradients else 0)
        begin = 2 * self._head_bytes
        *offsets, end = accumulate((_aligned(table.nbytes) for table in fixed.values()), initial=begin)
        self._memory = torch.empty(end, dtype=torch.uint8, device=self._device)
        self._stream = torch.cuda.current_stream(self._device)
        self._counter.record_stream(self._stream)
        self._start = self._memory.data_ptr()
        self._upload(begin, *fixed.values())
        self._fixed: dict[str, Any] = {
            **{name: self._start + offset for name, offset in zip(fixed, offsets, strict=True)},
            "device": self._memory.device.index or 0,
            "nonfinite": self._counter.data_ptr(),
            "row_count": len(kernel_rows),
            "step_count": len(self._tables.steps),
            "batches": batches,
        }
        self._groups = self._kernel_rows = self._spare = None

    def _upload(self, offset: int, *tables: npt.NDArray[np.generic]) -> None:
        """Begins to copy tables, packed through pinned memory, to an offset in the device memory of the tables."""
        staging = pinned(*tables)
        self._memory[offset : offset + len(staging)].copy_(staging, non_blocking=True)

    def _upload_in_graph(self, head: Sequence[npt.NDArray[np.generic]]) -> None:
        """Captures the upload of the head into a CUDA graph, from pinned memory that is kept for all replays."""
        wanted = _fill(torch.empty(self._head_bytes, dtype=torch.uint8, device="cpu"), head)
        staging = next((kept for kept in self._captured if torch.equal(kept, wanted)), None)
        if staging is None:
            _demand(self._spare is not None)
            assert self._spare is not None
            staging, self._spare = self._spare.copy_(wanted), None
            self._captured.append(staging)
        self._captured_scaling.append(self._scaling)
        self._head = self._head_bytes
        self._memory[self._head : self._head + len(staging)].copy_(staging, non_blocking=True)
        self._groups = self._kernel_rows = None  # stale: the capture uploaded to another offset than other steps read


def make_call(device: torch.device, tables: Tables, skipped: SkippedElements) -> Call:
    """Creates the :class:`Call` for a device, which must have passed :func:`shardopt.kernels.dispatch.check_device`."""
    return CpuCall(tables, skipped) if device.type == "cpu" else CudaCall(device, tables, skipped)


def use_in_current_stream(device: torch.device, tensors: Sequence[Tensor]) -> None:
    """Records for PyTorch's caching allocator that the current stream uses tensors, perhaps of another stream.

    Otherwise the allocator could reuse their memory in that stream before the kernels have read it. Does nothing in a
    CUDA graph capture, in which the caller must keep the tensors alive.

    Args:
        device: a CUDA device.
        tensors: tensors on any device; tensors of other devices are ignored.
    """
    if tensors and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device)
        for tensor in tensors:
            if tensor.device == device:
                tensor.record_stream(stream)


def _demand(ready: bool) -> None:
    """Raises RuntimeError unless ``ready``: a captured step lacks memory that only an uncaptured step can allocate."""
    if not ready:
        raise RuntimeError(
            "got a step captured into a CUDA graph, expected a step of the same parameters outside of a graph before; "
            "take a step with gradients for the same parameters before each capture"
        )


def pinned(*tables: npt.NDArray[np.generic]) -> Tensor:
    """Packs tables into new pinned memory, 16-byte aligned, which the allocator keeps until copies from it are done."""
    return _fill(_pinned(sum(_aligned(table.nbytes) for table in tables)), tables)


def _fill(staging: Tensor, tables: Sequence[npt.NDArray[np.generic]]) -> Tensor:
    """Packs tables into host memory, each padded with zeros to 16 bytes; returns that memory."""
    target, at = staging.numpy(), 0
    for table in tables:
        target[at : at + table.nbytes] = np.ascontiguousarray(table).view(np.uint8).reshape(-1)
        target[at + table.nbytes : at + _aligned(table.nbytes)] = 0
        at += _aligned(table.nbytes)
    return staging


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")


@cache
def _on(table: Tensor, device: torch.device) -> Tensor:
    """Copies a codec's lookup table to a device, once per process."""
    return table.to(device)
