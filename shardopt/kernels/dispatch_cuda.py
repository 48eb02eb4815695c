"""The call of the CUDA kernels: a step's tables in device memory, uploaded when they change and never waited for."""

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
    """Steps of the same tables on a CUDA device, in the streams that are current at each step.

    Tables are uploaded through pinned memory, which PyTorch's allocator keeps until the copy is done. Gradients'
    addresses change from step to step: the launch carries a few of them, many are uploaded by themselves. A captured
    CUDA graph uploads its tables again in every replay, to another offset, so that steps between replays do not matter:
    the call must live as long as the graph.

    Args:
        device: the steps' device.
        tables: the kernels' arguments.
        skipped: counter of skipped elements.
    """

    def __init__(self, device: torch.device, tables: Tables, skipped: SkippedElements) -> None:
        _demand(not torch.cuda.is_current_stream_capturing())
        self._device = device
        self._tables = tables
        self._codec_tables = [None if t is None else _on(t, device) for t in tables.codec_tables]
        self._counter = skipped.counter(device)
        self._rules: bytes | None = None
        self._groups: bytes | None  # as uploaded, None for stale tables
        self._kernel_rows: bytes | None  # as uploaded, without gradients, None for stale tables
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
        """Allocates the tables, and uploads the constant ones.

        The head comes first, the tables that change: groups, kernel rows, and addresses of gradients unless the launch
        carries them. A second head follows, for captures; then the constant tables.
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
        """Copies tables to an offset in the device's memory, one after the other."""
        staging = pinned(*tables)
        self._memory[offset : offset + len(staging)].copy_(staging, non_blocking=True)

    def _upload_in_graph(self, head: Sequence[npt.NDArray[np.generic]]) -> None:
        """Captures the upload of the tables that change, from memory that keeps them for all replays."""
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


def _demand(ready: bool) -> None:
    """Raises RuntimeError if a CUDA graph captures a step that needs memory first."""
    if not ready:
        raise RuntimeError(
            "got a step captured into a CUDA graph, expected a step of the same parameters outside of a graph before; "
            "take a step with gradients for the same parameters before each capture"
        )


def pinned(*tables: npt.NDArray[np.generic]) -> Tensor:
    """The bytes of tables, one after the other, in pinned memory that PyTorch's allocator keeps until it is copied."""
    return _fill(_pinned(sum(_aligned(table.nbytes) for table in tables)), tables)


def _fill(staging: Tensor, tables: Sequence[npt.NDArray[np.generic]]) -> Tensor:
    """Writes tables to host memory, one after the other."""
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
    """A codec's table on a device; codecs and their tables live as long as the process."""
    return table.to(device)
