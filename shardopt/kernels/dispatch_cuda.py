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
from shardopt.kernels.dispatch import Addresses, Call, CodecTables, CpuCall, KernelRows, LossScaling, addresses
from shardopt.kernels.skipped import SkippedElements

_ALIGNMENT = 16  # bytes


class CudaCall:
    """The :class:`Call` for operands on a CUDA device; each step's kernels run in the stream that is then current.

    All tables that kernels read are in one device allocation. The tables that change between steps are its first
    section: groups, kernel rows, and gradients' addresses unless these are few enough to be kernel arguments. A second
    section of that size is for CUDA graphs, whose replays upload it again, so that uncaptured steps between replays do
    not overwrite it. Constant tables follow. Uploads go through pinned memory, which PyTorch's allocator keeps until
    the copy is done, and which a capture keeps for all replays. The object must live as long as the graph.

    Args:
        device: the device of the kernels and of all operands.
        kernel_rows, steps, codec_tables, skipped: see :class:`shardopt.kernels.dispatch.CpuCall`.
    """

    def __init__(
        self,
        device: torch.device,
        kernel_rows: KernelRows,
        steps: Addresses,
        codec_tables: CodecTables,
        skipped: SkippedElements,
    ) -> None:
        _refuse_capture_if(torch.cuda.is_current_stream_capturing())
        self._device = device
        self._kernel_rows, self._steps = kernel_rows, steps
        self._codec_tables = [None if table is None else _device_copy(table, device) for table in codec_tables]
        self._counter = skipped.counter(device)
        self._rules: bytes | None = None  # the rules of the groups for which the device memory was laid out
        self._uploaded_groups: bytes | None  # None: upload it again
        self._uploaded_rows: bytes | None  # the same, with the gradients' addresses set to 0
        self._capture_buffer: Tensor | None  # pinned memory for the next capture, which cannot allocate any
        self._captured: list[Tensor] = []  # pinned memory that CUDA graphs upload from
        self._captured_scaling: list[LossScaling] = []  # keeps device scalars alive that CUDA graphs read

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step: uploads the tables that changed; see :class:`shardopt.kernels.dispatch.Call`.

        Raises:
            RuntimeError: a CUDA graph captures the first step of these rows, or no step was taken since the last
                capture.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        self._scaling = LossScaling(*(None if t is None else t.to(self._device, non_blocking=True) for t in scaling))
        rules, group_bytes = groups["rule"].tobytes(), groups.tobytes()
        if rules != self._rules:  # tasks depend on the rules
            _refuse_capture_if(capturing)
            self._lay_out_memory(groups)
            self._rules = rules
        row_bytes = self._uploaded_rows
        if rows_changed or row_bytes is None:
            self._gradients = self._kernel_rows["gradient"].copy()
            # Kernels read gradients' addresses from self._gradients: if only these change, rows need no upload.
            without_gradients = self._kernel_rows.copy()
            without_gradients["gradient"] = 0
            row_bytes = without_gradients.tobytes()
        changing = [groups, self._kernel_rows, *([self._gradients] if self._uploads_gradients else [])]
        if capturing:
            self._upload_in_graph(changing)
            return
        if self._capture_buffer is None:
            self._capture_buffer = _pinned_buffer(self._section_bytes)
        self._section_offset = 0  # run() reads the first section
        if row_bytes != self._uploaded_rows or self._uploaded_groups is None:
            self._upload(0, *changing)
        else:
            if group_bytes != self._uploaded_groups:
                self._upload(0, groups)
            if rows_changed and self._uploads_gradients:
                self._upload(self._gradients_offset, self._gradients)
        self._uploaded_groups, self._uploaded_rows = group_bytes, row_bytes

    def run(self, phase: _C.Phase) -> None:
        """Runs one phase; see :class:`shardopt.kernels.dispatch.Call`."""
        scale, found_inf, coefficient = self._scaling
        stream = torch.cuda.current_stream(self._device)
        section = self._base_address + self._section_offset
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            for tensor in (self._memory, self._counter):
                tensor.record_stream(stream)
        _C.step_cuda(
            groups=section,
            kernel_rows=section + self._rows_offset,
            gradients=section + self._gradients_offset if self._uploads_gradients else self._gradients.ctypes.data,
            grad_scale=0 if scale is None else scale.data_ptr(),
            factor=0 if coefficient is None else coefficient.data_ptr(),
            found_inf=0 if found_inf is None else found_inf.data_ptr(),
            phase=phase,
            stream=stream.cuda_stream,
            **self._constant_arguments,
        )

    def _lay_out_memory(self, groups: npt.NDArray[np.void]) -> None:
        """Allocates device memory for all tables, uploads the constant ones, and marks the others to be uploaded."""
        row_count, step_count = len(self._kernel_rows), len(self._steps)
        tasks, batches = _C.cuda_tasks(self._kernel_rows, groups)
        constant = {
            "steps": self._steps,
            "tables": addresses(self._codec_tables),
            "tasks": tasks,
            "prepared": np.zeros(row_count * _C.cuda_prepared_bytes, dtype=np.uint8),  # filled in by the kernels
        }
        self._rows_offset = _aligned(groups.nbytes)
        self._gradients_offset = self._rows_offset + _aligned(self._kernel_rows.nbytes)
        # Few addresses of gradients are kernel arguments instead.
        self._uploads_gradients = max(row_count, step_count) > _C.cuda_launched_gradients
        self._section_bytes = self._gradients_offset + (_aligned(8 * row_count) if self._uploads_gradients else 0)
        begin = 2 * self._section_bytes  # constant tables follow the two sections
        *offsets, end = accumulate((_aligned(table.nbytes) for table in constant.values()), initial=begin)
        self._memory = torch.empty(end, dtype=torch.uint8, device=self._device)
        self._stream = torch.cuda.current_stream(self._device)  # other streams that use the memory are recorded
        self._counter.record_stream(self._stream)
        self._base_address = self._memory.data_ptr()
        self._upload(begin, *constant.values())
        self._constant_arguments: dict[str, Any] = {
            **{name: self._base_address + offset for name, offset in zip(constant, offsets, strict=True)},
            "device": self._memory.device.index or 0,
            "nonfinite": self._counter.data_ptr(),
            "row_count": row_count,
            "step_count": step_count,
            "batches": batches,
        }
        self._uploaded_groups = self._uploaded_rows = self._capture_buffer = None

    def _upload(self, offset: int, *tables: npt.NDArray[np.generic]) -> None:
        """Begins to copy tables, packed through pinned memory, to an offset in the device memory of the tables."""
        staging = pin_packed(*tables)
        self._memory[offset : offset + len(staging)].copy_(staging, non_blocking=True)

    def _upload_in_graph(self, tables: Sequence[npt.NDArray[np.generic]]) -> None:
        """Captures the upload of the second section into a CUDA graph, from pinned memory that is kept for replays.

        Captures of equal tables share it: a capture cannot allocate any, and an uncaptured step keeps only one ready.
        """
        packed = _pack_into(torch.empty(self._section_bytes, dtype=torch.uint8, device="cpu"), tables)
        staging = next((kept for kept in self._captured if torch.equal(kept, packed)), None)
        if staging is None:
            _refuse_capture_if(self._capture_buffer is None)
            assert self._capture_buffer is not None
            staging, self._capture_buffer = self._capture_buffer.copy_(packed), None
            self._captured.append(staging)
        self._captured_scaling.append(self._scaling)
        self._section_offset = self._section_bytes
        self._memory[self._section_offset : self._section_offset + len(staging)].copy_(staging, non_blocking=True)
        # The first section, which uncaptured steps read, may be out of date now: the next of them uploads it.
        self._uploaded_groups = self._uploaded_rows = None


def make_call(device: torch.device, *operands: Any, **others: Any) -> Call:
    """Creates the :class:`Call` for a device that has passed ``check_device``; arguments as for :class:`CpuCall`."""
    return CpuCall(*operands, **others) if device.type == "cpu" else CudaCall(device, *operands, **others)


def use_in_current_stream(device: torch.device, tensors: Sequence[Tensor]) -> None:
    """Records for PyTorch's caching allocator that the device's current stream uses tensors, perhaps of another stream.

    Otherwise the allocator could reuse their memory in that stream before the kernels have read it. Ignores tensors of
    other devices. Does nothing in a CUDA graph capture, in which the caller must keep the tensors alive.
    """
    if tensors and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device)
        for tensor in tensors:
            if tensor.device == device:
                tensor.record_stream(stream)


def _refuse_capture_if(lacks_memory: bool) -> None:
    """Raises RuntimeError if a captured step lacks memory, which only an uncaptured step can allocate."""
    if lacks_memory:
        raise RuntimeError(
            "got a step captured into a CUDA graph, expected a step of the same parameters outside of a graph before; "
            "take a step with gradients for the same parameters before each capture"
        )


def pin_packed(*tables: npt.NDArray[np.generic]) -> Tensor:
    """Packs tables into new pinned memory, 16-byte aligned, which the allocator keeps until copies from it are done."""
    return _pack_into(_pinned_buffer(sum(_aligned(table.nbytes) for table in tables)), tables)


def _pack_into(staging: Tensor, tables: Sequence[npt.NDArray[np.generic]]) -> Tensor:
    """Writes tables one after another into ``staging`` (host memory), each zero-padded to 16 bytes; returns it."""
    target, offset = staging.numpy(), 0
    for table in tables:
        target[offset : offset + table.nbytes] = np.ascontiguousarray(table).view(np.uint8).reshape(-1)
        target[offset + table.nbytes : offset + _aligned(table.nbytes)] = 0
        offset += _aligned(table.nbytes)
    return staging


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pinned_buffer(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")


@cache
def _device_copy(table: Tensor, device: torch.device) -> Tensor:
    """Copies a codec's lookup table to a device, once per process."""
    return table.to(device)
