"""The call of the CUDA kernels: a step's tables in device memory, uploaded when they change and never waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import LossScaling, Tables, addresses
from shardopt.kernels.skipped import SkippedElements

_ALIGNMENT = 16  # bytes
#: Whether special kernels step blocks of usual formats; bits are the same. Benchmarks compare both.
ALIGNED_KERNELS = True


class CudaCall:
    """Steps of the same tables on a CUDA device, in the streams that are current at each step.

    Tables are uploaded through pinned memory, which PyTorch's allocator keeps until the copy is done. Gradients'
    addresses change from step to step: the launch carries a few of them, many are uploaded by themselves. A captured
    CUDA graph uploads its tables again in every replay, to another offset, so that steps between replays do not matter:
    the call must live as long as the graph.

    Args:
        device: the steps' device.
        tables: the kernels' arguments.
        skipped: counter of skipped elements; by default a counter of this call alone.
    """

    def __init__(self, device: torch.device, tables: Tables, skipped: SkippedElements | None = None) -> None:
        _demand(not _is_capturing())
        self._device = device
        self._tables = tables
        self._codec_tables = [None if t is None else _on(t, device) for t in tables.codec_tables]
        self.skipped = skipped or SkippedElements()
        self._counter = self.skipped.counter(device)
        self._rules: bytes | None = None
        self._groups: bytes | None = None  # as uploaded, None for stale tables
        self._kernel_rows: bytes | None = None  # as uploaded, without gradients, None for stale tables
        self._scaling = LossScaling(None, None)
        self._spare: Tensor | None = None  # pinned memory for a capture, which cannot allocate any
        self._captured: list[Tensor] = []  # pinned memory that CUDA graphs upload from
        self._captured_scaling: list[LossScaling] = []

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step; see :class:`shardopt.kernels.dispatch.Call`.

        Raises:
            RuntimeError: a CUDA graph captures the first step of these tables, or no step was taken since the last
                capture.
        """
        capturing = _is_capturing()
        self._scaling = LossScaling(*(None if t is None else t.to(self._device, non_blocking=True) for t in scaling))
        rules, packed = groups["rule"].tobytes(), groups.tobytes()
        if rules != self._rules:
            _demand(not capturing)
            self._make_tables(groups)
            self._rules = rules
        kernel_rows = self._kernel_rows
        if rows_changed or kernel_rows is None:
            self._gradients = np.ascontiguousarray(self._tables.kernel_rows["gradient"])
            kernel_rows = _without_gradients(self._tables.kernel_rows)
        if capturing:
            self._head = self._offsets.captured
            self._upload_in_graph(groups)
            return
        if self._spare is None:
            self._spare = _pinned(self._offsets.head_bytes)
        self._head = 0
        if kernel_rows != self._kernel_rows or self._groups is None:
            self._upload(0, _pinned(self._offsets.head_bytes), *self._head_tables(groups))
        else:
            if packed != self._groups:
                self._upload(0, _pinned(len(packed)), groups)
            if rows_changed and self._offsets.uploads_gradients:
                self._upload(self._offsets.gradients, _pinned(self._gradients.nbytes), self._gradients)
        self._groups, self._kernel_rows = packed, kernel_rows

    def run(self, phase: _C.Phase) -> None:
        """Runs one phase; see :class:`shardopt.kernels.dispatch.Call`."""
        scale, found_inf, coefficient = self._scaling
        stream = torch.cuda.current_stream(self._device)
        head = self._start + self._head
        if stream != self._stream and not _is_capturing():
            for tensor in (self._memory, self._counter):
                tensor.record_stream(stream)
        _C.step_cuda(
            groups=head,
            kernel_rows=head + self._offsets.kernel_rows,
            gradients=head + self._offsets.gradients if self._offsets.uploads_gradients else _address(self._gradients),
            grad_scale=0 if scale is None else scale.data_ptr(),
            factor=0 if coefficient is None else coefficient.data_ptr(),
            found_inf=0 if found_inf is None else found_inf.data_ptr(),
            phase=phase,
            stream=stream.cuda_stream,
            **self._fixed,
        )

    def _make_tables(self, groups: npt.NDArray[np.void]) -> None:
        """Allocates the tables, and uploads the constant ones."""
        kernel_rows = self._tables.kernel_rows
        tasks, batches = _C.cuda_tasks(kernel_rows, groups, ALIGNED_KERNELS)
        fixed = {
            "steps": self._tables.steps,
            "tables": addresses(self._codec_tables),
            "tasks": tasks,
            "prepared": np.zeros(len(kernel_rows) * _C.cuda_prepared_bytes, dtype=np.uint8),  # filled in by the kernels
        }
        self._offsets = _Offsets.of(groups, kernel_rows, len(self._tables.steps))
        begin = end = self._offsets.captured + self._offsets.head_bytes
        offsets = {}
        for name, table in fixed.items():
            offsets[name] = end
            end += _aligned(table.nbytes)
        self._memory = torch.empty(end, dtype=torch.uint8, device=self._device)
        self._stream = torch.cuda.current_stream(self._device)
        self._counter.record_stream(self._stream)
        self._start = self._memory.data_ptr()
        self._upload(begin, _pinned(end - begin), *fixed.values())
        self._fixed: dict[str, Any] = {
            **{name: self._start + offset for name, offset in offsets.items()},
            "device": self._memory.device.index or 0,
            "nonfinite": self._counter.data_ptr(),
            "row_count": len(kernel_rows),
            "step_count": len(self._tables.steps),
            "batches": batches,
        }
        self._head = 0
        self._spare = None
        self._groups = self._kernel_rows = None

    def _head_tables(self, groups: npt.NDArray[np.void]) -> list[npt.NDArray[Any]]:
        """The tables that change, in the order of their offsets."""
        gradients = [self._gradients] if self._offsets.uploads_gradients else []
        return [groups, self._tables.kernel_rows, *gradients]

    def _upload(self, offset: int, staging: Tensor, *tables: npt.NDArray[np.generic]) -> None:
        """Copies tables to an offset in the device's memory, one after the other."""
        _fill(staging, tables)
        self._memory[offset : offset + len(staging)].copy_(staging, non_blocking=True)

    def _upload_in_graph(self, groups: npt.NDArray[np.void]) -> None:
        """Captures the upload of the tables that change, from memory that keeps them for all replays."""
        tables = self._head_tables(groups)
        wanted = _fill(torch.empty(self._offsets.head_bytes, dtype=torch.uint8, device="cpu"), tables)
        staging = next((kept for kept in self._captured if torch.equal(kept, wanted)), None)
        if staging is None:
            _demand(self._spare is not None)
            assert self._spare is not None
            staging = self._spare.copy_(wanted)
            self._captured.append(staging)
            self._spare = None
        self._captured_scaling.append(self._scaling)
        self._memory[self._head : self._head + len(staging)].copy_(staging, non_blocking=True)
        self._groups = self._kernel_rows = None  # stale: the capture uploaded to another offset than other steps read


def _demand(ready: bool) -> None:
    """Raises RuntimeError if a CUDA graph captures a step that needs memory first."""
    if not ready:
        raise RuntimeError(
            "got a step captured into a CUDA graph, expected a step of the same parameters outside of a graph before; "
            "take a step with gradients for the same parameters before each capture"
        )


def _fill(staging: Tensor, tables: Sequence[npt.NDArray[np.generic]]) -> Tensor:
    """Writes tables to host memory, one after the other."""
    target, at = staging.numpy(), 0
    for table in tables:
        target[at : at + table.nbytes] = np.ascontiguousarray(table).view(np.uint8).reshape(-1)
        target[at + table.nbytes : at + _aligned(table.nbytes)] = 0
        at += _aligned(table.nbytes)
    return staging


class _Offsets(NamedTuple):
    """Offsets of the tables that change, in bytes: groups (at 0), kernel rows, gradients, and copies for captures."""

    kernel_rows: int
    gradients: int
    head_bytes: int
    captured: int
    uploads_gradients: bool  # False: the launch carries the addresses

    @classmethod
    def of(cls, groups: npt.NDArray[np.void], kernel_rows: npt.NDArray[np.void], steps: int) -> _Offsets:
        first = _aligned(groups.nbytes)
        second = first + _aligned(kernel_rows.nbytes)
        uploads = max(len(kernel_rows), steps) > _C.cuda_launched_gradients
        end = second + (_aligned(8 * len(kernel_rows)) if uploads else 0)
        return cls(first, second, end, end, uploads)


def _without_gradients(kernel_rows: npt.NDArray[np.void]) -> bytes:
    kernel_rows = kernel_rows.copy()
    kernel_rows["gradient"] = 0
    return kernel_rows.tobytes()


def _address(array: npt.NDArray[np.uint64]) -> int:
    return int(array.__array_interface__["data"][0])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


_table_copies: dict[tuple[int, torch.device], Tensor] = {}


def _on(table: Tensor, device: torch.device) -> Tensor:
    """A codec's table on a device; codecs and their tables live as long as the process."""
    key = (table.data_ptr(), device)
    if key not in _table_copies:
        _table_copies[key] = table.to(device)
    return _table_copies[key]
